# The functions of hack/cluster.sh and of its stories. Source it after machine.sh; do not run it.
# shellcheck shell=bash
# shellcheck source-path=SCRIPTDIR source=certificates.sh
source hack/cluster/certificates.sh
# shellcheck source-path=SCRIPTDIR source=images.sh
source hack/cluster/images.sh

# use_cluster DIRECTORY: selects the cluster.
use_cluster() {
    tools=$(realpath "$(tools_directory)")
    cluster=$(realpath --canonicalize-missing "$1")
}
# Whether a process runs. The files with PIDs survive the processes.
runs() {
    [[ -e $1 ]] && kill -0 "$(<"$1")" 2>/dev/null
}
# wait_until SECONDS DESCRIPTION COMMAND…
wait_until() {
    local end=$((SECONDS + $1)) description=$2
    shift 2
    until "$@" &>/dev/null; do
        ((SECONDS < end)) || die "$description: timeout; see the logs in $cluster/node*/logs"
        sleep 0.2
    done
}
# child_of PID FILE: writes the PID of the first child of a process into the file.
child_of() {
    local child=''
    until child=$(cat "/proc/$1/task/$1/children" 2>/dev/null) && [[ -n $child ]]; do
        kill -0 "$1" 2>/dev/null || die "a process of the cluster ended; see the logs in $cluster"
        sleep 0.02
    done
    echo "${child%% *}" >"$2"
}
# control_groups: the directory of the cluster's control group in each hierarchy. The inode tells clusters apart.
control_groups() {
    local hierarchy name
    name=detour-cluster-$(stat -c %i "$cluster")
    for hierarchy in /sys/fs/cgroup/ /sys/fs/cgroup/*/; do
        [[ ! -e ${hierarchy}cgroup.procs ]] || echo "$hierarchy$name"
    done
}
make_control_groups() {
    local group file
    for group in $(control_groups); do
        mkdir -p "$group/node$1"
        for file in cpuset.cpus cpuset.mems; do
            # In cgroup v1, a new group has no processors.
            [[ ! -e $group/$file || -e $group/cgroup.controllers ]] || {
                cat "${group%/*}/$file" >"$group/$file"
                cat "$group/$file" >"$group/node$1/$file"
            }
        done
    done
}
# remove_control_groups [NODE]: removes those of a node, or all. After a power failure, none is left.
remove_control_groups() {
    local group
    for group in $(control_groups); do
        group+=${1:+/node$1}
        [[ ! -d $group ]] || find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
    done
}

# enter NODE COMMAND…
enter() {
    local node=$1 socket
    shift
    runs "$cluster/node$node/pid" || die "node $node does not run; start it with hack/cluster.sh up or reboot"
    socket=unix:///run/containerd/containerd.sock
    [[ $(<"$cluster/runtime") == containerd ]] || socket=unix:///run/crio/crio.sock
    nsenter --target "$(<"$cluster/node$node/pid")" --mount --net --pid --uts --ipc --root --wd -- \
        env --ignore-environment --chdir "$PWD" HOME=/root TERM="${TERM:-dumb}" CLUSTER="$cluster" NODE="$node" TOOLS="$tools" \
        PATH="$cluster/bin:$tools/runtimes:$tools:/usr/sbin:/usr/bin:/sbin:/bin" KUBECONFIG="$cluster/certificates/admin.conf" \
        CONTAINER_RUNTIME_ENDPOINT="$socket" IMAGE_SERVICE_ENDPOINT="$socket" "$@"
}
# boot NODE: starts a node without programs.
boot() {
    local directory=$cluster/node$1
    mkdir -p "$directory"/{root,data,logs}
    rm -f "$directory/booted"
    make_control_groups "$1"
    CLUSTER=$cluster NODE=$1 TOOLS=$tools setsid unshare --mount --net --pid --uts --ipc --fork --kill-child \
        --propagation private bash hack/cluster/node.sh first </dev/null &>>"$directory/logs/node.log" &
    child_of $! "$directory/pid"
    # The veth pair never exists in the machine's network namespace.
    nsenter --target "$(<"$cluster/outside.pid")" --net \
        ip link add "node$1" master lan up type veth peer name eth0 netns "$(<"$directory/pid")"
    wait_until 60 "node $1: boot" test -e "$directory/booted"
}
# cut_power NODE
cut_power() {
    local pid
    runs "$cluster/node$1/pid" || return 0
    pid=$(<"$cluster/node$1/pid")
    kill -KILL "$pid"
    wait_until 60 "node $1: end of its processes" eval "! kill -0 $pid"
    rm "$cluster/node$1/pid"
    remove_control_groups "$1"
}
start_outside() {
    setsid unshare --net --pid --fork --kill-child /usr/bin/python3 hack/cluster/outside.py "$cluster/certificates/admin.conf" "$tools/kubectl" \
        </dev/null &>"$cluster/outside.log" &
    child_of $! "$cluster/outside.pid"
    wait_until 30 "the network outside of the cluster" grep -q ready "$cluster/outside.log"
}
end_all() {
    local directory
    for directory in "$cluster"/node*/; do
        [[ ! -d $directory ]] || cut_power "$(basename "$directory" | tr -cd 0-9)"
    done
    ! runs "$cluster/outside.pid" || kill -KILL "$(<"$cluster/outside.pid")"
}
# is_ready NODE: whether the node is ready.
is_ready() {
    [[ $(enter 1 kubectl get node "node$1" -o jsonpath='{.status.conditions[?(@.type=="Ready")].status}') == True ]]
}

# up RUNTIME NODES
up() {
    local runtime=$1 nodes=$2 n
    [[ ! -e $cluster/runtime ]] || die "the cluster in $cluster exists; remove it with hack/cluster.sh down"
    grep -qw overlay /proc/filesystems || modprobe overlay 2>/dev/null || die "the kernel has no overlay file system"
    need_commands ip=iproute2 iptables=iptables nft=nftables ipset=ipset conntrack=conntrack jq=jq curl=curl socat=socat \
        tcpdump=tcpdump openssl=openssl etcd=etcd-server runc=runc conmon=conmon skopeo=skopeo umoci=umoci gcc=build-essential \
        busybox=busybox-static nsenter=util-linux /usr/bin/python3=python3 /usr/lib/cni/bridge=containernetworking-plugins
    need_apiserver
    need_crictl
    need_helm
    need_node
    if [[ $runtime == crio ]]; then
        need_runtimes cri-o
        [[ -z $without_crio ]] || die "$without_crio"
    else
        need_runtimes
    fi
    make_images pause tools detour
    say "starting the cluster in $cluster"
    mkdir -p "$cluster"/{certificates,bin}
    [[ $(stat -f -c %T "$cluster") != overlayfs ]] || die "$cluster is on overlayfs: set CLUSTER to a directory on another file system"
    echo "$runtime" >"$cluster/runtime"
    make_certificates "$cluster/certificates" "$nodes"
    start_outside
    for ((n = 1; n <= nodes; n++)); do
        boot "$n"
        enter "$n" bash hack/cluster/node.sh start
    done
    load pause tools detour
    enter 1 kubectl apply -f hack/cluster/dns.yaml >/dev/null
    for ((n = 1; n <= nodes; n++)); do
        wait_until 120 "node $n: ready" is_ready "$n"
    done
    enter 1 kubectl get nodes --output wide
}

down() {
    [[ -d $cluster ]] || return 0
    [[ -e $cluster/runtime ]] || die "$cluster is not the directory of a cluster"
    end_all
    remove_control_groups
    # The runtime's mounts ended with the mount namespaces, which the kernel frees shortly after the last process.
    wait_until 60 "remove $cluster" rm -rf --one-file-system "$cluster"
}
