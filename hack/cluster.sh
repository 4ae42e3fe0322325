#!/usr/bin/env bash
# Runs a Kubernetes cluster of real components on this machine, without a container engine and without virtual machines:
# etcd, kube-apiserver, kube-controller-manager, kube-scheduler, kubelet, kube-proxy, and containerd 2.2 or CRI-O 1.34.
# Each node has a root directory and mount, network, PID, UTS and IPC namespaces of its own. A further network namespace is
# the network outside of the cluster: a DNS server, and a server on 198.51.100.20:443 that logs who connects.
#
# up loads detour's image, so that its chart can be installed:
#   hack/cluster.sh up
#   hack/cluster.sh enter helm install detour manifests/chart --namespace kube-system --set hub=localhost
#
# Usage: hack/cluster.sh up [--runtime NAME] [--nodes NUMBER]
#        hack/cluster.sh down
#        hack/cluster.sh enter [--node NUMBER] COMMAND…
#        hack/cluster.sh reboot [--node NUMBER] [PROGRAM]…
#        hack/cluster.sh start [--node NUMBER] [PROGRAM]…
#        hack/cluster.sh stop [--node NUMBER] [--kill] [PROGRAM]…
#        hack/cluster.sh load IMAGE…
#   up      create a cluster and wait until its nodes are ready
#   down    end all its processes and remove its directory; the tools and images that were built stay
#   enter   run a command on a node, in this repository, with kubectl, helm and crictl in PATH
#   reboot  cut the power of a node: its processes, network namespaces and /run are gone, its disk stays. Then start the
#           programs, in this order; by default all
#   start   start programs on a node that do not run: etcd, kube-apiserver, kube-controller-manager, kube-scheduler
#           (node 1), containerd or crio, kubelet, kube-proxy; by default all
#   stop    end programs with SIGTERM, or with SIGKILL; by default all. Containers continue to run
#   load    build images from the programs of the tools directory, and load them into each node: pause, tools (busybox
#           and a stand-in for the sidecar), detour, pilot, proxyv2, install-cni, multus; NAME:TAG sets the tag
#   --runtime NAME   containerd (default) or crio
#   --nodes NUMBER   1 (default) or 2: a second node with a kubelet and a runtime of its own
#   --node NUMBER    the node (default: 1)
# Environment: CLUSTER (the cluster's directory; default: target/cluster), DETOUR_PROGRAM (the static binary in detour's
# image; default: the release build, which takes several minutes)
#
# The first run builds the programs from Go modules: about 25 minutes on two busy cores, CRI-O another 10, Istio 40; 1.3 GB
# of programs. It installs packages with apt-get, and changes nothing else outside of its namespaces, its directory and its
# control groups (detour-cluster-*). It works beside a running Docker or containerd: it uses none of their sockets,
# directories, bridges or iptables rules. down leaves only the tools and images.
# It needs root, a kernel with overlay, veth, bridge, nf_tables and nft_compat, and a directory on a file system other
# than overlayfs. With cgroup v1, excluding containers needs the hierarchy of cgroup v2 beside it (hybrid). It has run on
# such a machine, not with cgroup v2 alone.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh
# shellcheck source-path=SCRIPTDIR source=cluster/functions.sh
source hack/cluster/functions.sh

usage() {
    echo "cluster.sh: $*; see hack/cluster.sh --help" >&2
    exit 2
}
command=${1:-}
[[ $# -gt 0 ]] || usage "expected a command"
shift
runtime=containerd nodes=1 node=1 kill=''
while [[ ${1:-} == --* ]]; do
    case $1 in
        --kill)
            kill=$1
            shift
            continue
            ;;
        --runtime) runtime=${2:-} ;;
        --nodes) nodes=${2:-} ;;
        --node) node=${2:-} ;;
        *) usage "unknown option \"$1\"" ;;
    esac
    [[ $# -gt 1 ]] || usage "$1: expected a value"
    shift 2
done
case $runtime in
    containerd | crio) ;;
    cri-o) runtime=crio ;;
    *) usage "--runtime: invalid value \"$runtime\"; expected containerd or crio" ;;
esac
[[ $nodes == [12] ]] || usage "--nodes: invalid value \"$nodes\"; expected 1 or 2"
[[ $node == [12] ]] || usage "--node: invalid value \"$node\"; expected 1 or 2"
need_root
use_cluster "${CLUSTER:-$(target_directory)/cluster}"

case $command in
    up)
        # Logs of a cluster that did not start stay until down.
        trap 'end_all' EXIT
        up "$runtime" "$nodes"
        trap - EXIT
        ;;
    down) down ;;
    enter)
        [[ $# -gt 0 ]] || usage "enter: expected a command"
        enter "$node" "$@"
        ;;
    reboot)
        cut_power "$node"
        boot "$node"
        enter "$node" bash hack/cluster/node.sh start "$@"
        ;;
    start) enter "$node" bash hack/cluster/node.sh start "$@" ;;
    stop) enter "$node" bash hack/cluster/node.sh stop ${kill:+"$kill"} "$@" ;;
    load)
        make_images "$@"
        load "$@"
        ;;
    *) usage "unknown command \"$command\"" ;;
esac
