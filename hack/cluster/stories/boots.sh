#!/usr/bin/env bash
# Boots of a node: power failure, orderly, without an API server; restarts of the runtime and of the kubelet.
# shellcheck source-path=SCRIPTDIR source=../story.sh
source "$(dirname "$0")/../story.sh"

# The number of containers that started again, of all pods.
restarts() {
    k get pods --namespace mesh -o json | jq '[.items[].status | (.containerStatuses + .initContainerStatuses)[]?.restartCount] | add'
}
# running NAME: how many containers with this name run.
running() {
    enter 1 crictl ps --name "^$1\$" --state Running --quiet | wc -l
}
has_failed_twice() {
    (($(tail -n "+$logged" "$cluster/node1/logs/kubelet.log" | grep -c 'CreatePodSandbox for pod failed.*mesh/static-node1') > 1))
}
started_again() {
    (($(restarts) > before))
}
# returns DESCRIPTION: waits until all pods are ready in new sandboxes.
returns() {
    local began=$SECONDS
    eventually 180 started_again || true
    ready 240 mesh
    k --namespace kube-system rollout status daemonset/detour-agent --timeout 240s >/dev/null
    echo "          $1: all pods are ready after $((SECONDS - began)) s"
    expect_captured "$1" web 3
    expect_captured "$1: static pod" static 1
    expect_none_outside "$1"
}

up "$RUNTIME" 1
runtime=$(<"$cluster/runtime")
k create namespace mesh >/dev/null
install_detour --set global.platform=kubernetes
record_packets
meshed Deployment web '.spec.replicas = 3'
sed 's/NAME/static/' hack/cluster/pods/meshed.yaml | enter 1 tee /etc/kubernetes/manifests/static.yaml >/dev/null
# A pod without a sidecar.
sed 's/NAME/plain/' hack/cluster/pods/meshed.yaml | k create --dry-run=client -o json -f - | jq 'del(.metadata.annotations)
    | .spec.initContainers = [] | .spec.containers |= [.[0] + { name: "plain", command: ["sleep", "infinity"] }]' |
    enter 1 tee /etc/kubernetes/manifests/plain.json >/dev/null
rollout deployment/web
eventually 60 k get pod --namespace mesh static-node1 plain-node1
ready 120 mesh

for kind in "power failure" "orderly boot" "boot without an API server"; do
    before=$(restarts)
    [[ $kind != "orderly boot" ]] || enter 1 bash hack/cluster/node.sh stop kube-proxy kubelet "$runtime" kube-scheduler \
        kube-controller-manager kube-apiserver etcd
    cut_power 1
    boot 1
    logged=$(wc -l <"$cluster/node1/logs/kubelet.log")
    if [[ $kind == *without* ]]; then
        enter 1 bash hack/cluster/node.sh start "$runtime" kubelet
        began=$SECONDS
        expect_within 60 "$kind, without an agent: static pods without a sidecar" 1 running plain
        echo "          after $((SECONDS - began)) s"
        # The kubelet tries again and again to start the static pod with a sidecar.
        eventually 120 has_failed_twice
        expect "$kind, without an agent: applications with a sidecar that run" 0 "$(running app)"
    fi
    enter 1 bash hack/cluster/node.sh start
    returns "$kind"
done

say "restarts while pods start"
for program in "$runtime" kubelet; do
    for signal in "" --kill; do
        k rollout restart --namespace mesh deployment/web >/dev/null
        sleep 1
        enter 1 bash hack/cluster/node.sh stop ${signal:+"$signal"} "$program"
        enter 1 bash hack/cluster/node.sh start
        rollout deployment/web
        eventually 120 prints 3 pods web
        expect_captured "$program stopped${signal:+ with $signal} and started" web 3
    done
done
expect_none_outside "all"
