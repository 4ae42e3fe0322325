#!/usr/bin/env bash
# Runs on a node of hack/cluster.sh: its first process, and the start and end of its programs.
#
# Usage: hack/cluster/node.sh first | start [PROGRAM]… | stop [--kill] [PROGRAM]…
# Environment: CLUSTER (the cluster's directory), NODE (the node's number), TOOLS (the directory of the programs)
set -euo pipefail
cluster=${CLUSTER:?} directory=${CLUSTER:?}/node${NODE:?} address=192.168.77.$((NODE + 1))
certificates=$cluster/certificates

# first: makes the node's root directory from the machine's programs, read-only, and directories of its own.
first() {
    local root=$directory/root name repository=$PWD file
    mount --bind "$root" "$root"
    cd "$root"
    for name in bin sbin lib lib32 lib64 libx32; do
        [[ ! -L /$name ]] || cp -a -n "/$name" .
    done
    mkdir -p usr proc sys dev run tmp etc var/{lib,log,tmp} opt/cni/bin home root mnt old
    ln -sfn /run var/run
    if [[ ! -e etc/passwd ]]; then
        for name in alternatives group iproute2 ld.so.cache localtime nsswitch.conf passwd protocols services ssl; do
            [[ ! -e /etc/$name ]] || cp -a "/etc/$name" etc
        done
        tr -d - </proc/sys/kernel/random/uuid >etc/machine-id
        echo "127.0.0.1 localhost" >etc/hosts
        echo "nameserver 192.168.77.1" >etc/resolv.conf
        mkdir -p etc/cni/net.d etc/kubernetes/manifests
        cp /usr/lib/cni/{bridge,host-local,loopback,portmap} opt/cni/bin
        network_configuration >etc/cni/net.d/10-net.conflist
    fi
    mount --bind /usr usr
    mount -o remount,bind,ro usr
    mount -t proc proc proc
    mount -t sysfs sysfs sys
    mount --rbind /sys/fs/cgroup sys/fs/cgroup
    mount -t tmpfs -o mode=0755 tmpfs dev
    mount -t tmpfs -o mode=0755 tmpfs run
    mount -t tmpfs tmpfs tmp
    mkdir -p dev/{pts,shm,mqueue} run/{lock,netns,sysctl,programs}
    for name in null zero full random urandom tty kmsg fuse; do
        [[ ! -e /dev/$name ]] || cp -a "/dev/$name" dev
    done
    ln -s pts/ptmx dev/ptmx
    ln -s /proc/self/fd dev/fd
    mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts dev/pts
    mount -t tmpfs tmpfs dev/shm
    mount -t mqueue mqueue dev/mqueue
    # The kubelet writes these settings, which belong to the machine.
    for file in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
        [[ -e /proc/sys/$file ]] || continue
        cat "/proc/sys/$file" >"run/sysctl/${file//\//_}"
        mount --bind "run/sysctl/${file//\//_}" "proc/sys/$file"
    done
    # They can be below /tmp.
    mkdir -p "./$repository" "./$cluster" "./$TOOLS"
    mount --bind "$repository" "./$repository"
    mount --bind "$TOOLS" "./$TOOLS"
    mount --bind "$cluster" "./$cluster"
    hostname "node$NODE"
    pivot_root . old
    cd /
    umount -l /old
    # Containers see mounts of network namespaces only below shared mounts, as systemd makes them.
    mount --make-rshared /
    ip link set lo up
    until ip link show dev eth0 &>/dev/null; do sleep 0.05; done
    ip address add "$address/24" dev eth0
    ip link set eth0 up
    ip route add default via 192.168.77.1
    ip route add "10.85.$((3 - NODE)).0/24" via "192.168.77.$((4 - NODE))"
    for name in ipv4.ip_forward ipv6.conf.all.forwarding bridge.bridge-nf-call-iptables bridge.bridge-nf-call-ip6tables; do
        file=/proc/sys/net/${name//./\/}
        [[ ! -e $file ]] || echo 1 >"$file"
    done
    touch "$directory/booted"
    trap '' HUP INT TERM
    # The shell reaps the processes whose parents ended.
    while :; do sleep 3600 & wait $! || true; done
}

network_configuration() {
    cat <<EOF
{
  "cniVersion": "1.0.0", "name": "net",
  "plugins": [
    {
      "type": "bridge", "bridge": "cni0", "isDefaultGateway": true, "hairpinMode": true,
      "ipam": { "type": "host-local", "ranges": [ [ { "subnet": "10.85.$NODE.0/24" } ] ] }
    },
    { "type": "portmap", "capabilities": { "portMappings": true } }
  ]
}
EOF
}

configure_kubelet() {
    local socket=/run/containerd/containerd.sock
    [[ $(<"$cluster/runtime") == containerd ]] || socket=/run/crio/crio.sock
    cat >/etc/kubernetes/kubelet.yaml <<EOF
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false
failSwapOn: false
cgroupDriver: cgroupfs
cgroupRoot: /detour-cluster-$(stat -c %i "$cluster")/node$NODE
containerRuntimeEndpoint: unix://$socket
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $certificates/ca.crt}}
authorization: {mode: Webhook}
clusterDNS: [10.96.0.10]
clusterDomain: cluster.local
tlsCertFile: $certificates/kubelet-server-node$NODE.crt
tlsPrivateKeyFile: $certificates/kubelet-server-node$NODE.key
staticPodPath: /etc/kubernetes/manifests
resolvConf: /etc/resolv.conf
evictionHard: {memory.available: 100Mi, nodefs.available: "1%", imagefs.available: "1%"}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
syncFrequency: 10s
EOF
}

configure_containerd() {
    mkdir -p /etc/containerd
    cat >/etc/containerd/config.toml <<EOF
version = 3
root = "$directory/data/containerd"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "localhost/pause:1"
[plugins."io.containerd.cri.v1.runtime"]
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["/opt/cni/bin", "/home/kubernetes/bin"]
    conf_dir = "/etc/cni/net.d"
[plugins."io.containerd.nri.v1.nri"]
  disable = false
EOF
}

configure_crio() {
    mkdir -p /etc/crio /var/log/crio /run/crio "$directory/data/crio"
    install -m 0755 hack/cluster/runc.sh "$cluster/bin/crio-runc"
    printf '{"default":[{"type":"insecureAcceptAnything"}]}' >/etc/crio/policy.json
    cat >/etc/crio/crio.conf <<EOF
[crio]
root = "$directory/data/crio"
runroot = "/run/crio/storage"
storage_driver = "vfs"
log_dir = "/var/log/crio"
version_file = "/run/crio/version"
version_file_persist = ""
# Else, CRI-O deletes its images after a power failure.
clean_shutdown_file = ""
[crio.runtime]
default_runtime = "runc"
cgroup_manager = "cgroupfs"
conmon_cgroup = "pod"
pinns_path = "$TOOLS/runtimes/pinns"
# The agent's container mounts the network namespaces from here.
namespaces_dir = "/var/run"
container_exits_dir = "/run/crio/exits"
container_attach_socket_dir = "/run/crio"
apparmor_profile = "unconfined"
[crio.runtime.runtimes.runc]
runtime_path = "$cluster/bin/crio-runc"
runtime_root = "/run/crio/runc"
monitor_path = "/usr/bin/conmon"
monitor_cgroup = "pod"
[crio.image]
pause_image = "localhost/pause:1"
pause_command = ""
signature_policy = "/etc/crio/policy.json"
[crio.network]
network_dir = "/etc/cni/net.d"
plugin_dirs = ["/opt/cni/bin", "/home/kubernetes/bin"]
[crio.nri]
enable_nri = true
EOF
}

is_running() {
    [[ -e /run/programs/$1 ]] && kill -0 "$(</run/programs/"$1")" 2>/dev/null
}
# run NAME COMMAND…: starts a program unless it runs.
run() {
    local name=$1
    shift
    is_running "$name" && return
    setsid "$@" </dev/null &>>"$directory/logs/$name.log" &
    echo $! >"/run/programs/$name"
}
# until_ready NAME COMMAND…
until_ready() {
    local name=$1 end=$((SECONDS + 300))
    shift
    until "$@" &>/dev/null; do
        if ! is_running "$name" || ((SECONDS > end)); then
            echo "node.sh: $name on node $NODE: not ready; see $directory/logs/$name.log" >&2
            exit 1
        fi
        sleep 0.1
    done
}

start() {
    local key=$certificates/service-account
    case $1 in
        etcd)
            mkdir -p "$directory/data/etcd"
            chmod 0700 "$directory/data/etcd"
            run etcd etcd --data-dir "$directory/data/etcd" --unsafe-no-fsync --listen-client-urls http://127.0.0.1:2379 \
                --advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380
            ;;
        kube-apiserver)
            run "$1" kube-apiserver --etcd-servers http://127.0.0.1:2379 --advertise-address "$address" --secure-port 6443 \
                --client-ca-file "$certificates/ca.crt" --tls-cert-file "$certificates/apiserver.crt" \
                --tls-private-key-file "$certificates/apiserver.key" --service-cluster-ip-range 10.96.0.0/16 \
                --service-account-issuer https://kubernetes.default.svc --service-account-key-file "$key.pub" \
                --service-account-signing-key-file "$key.key" --kubelet-preferred-address-types InternalIP \
                --kubelet-client-certificate "$certificates/apiserver-kubelet-client.crt" \
                --kubelet-client-key "$certificates/apiserver-kubelet-client.key" \
                --proxy-client-cert-file "$certificates/front-proxy-client.crt" \
                --proxy-client-key-file "$certificates/front-proxy-client.key" \
                --requestheader-client-ca-file "$certificates/ca.crt" --requestheader-allowed-names front-proxy-client \
                --requestheader-username-headers X-Remote-User --requestheader-group-headers X-Remote-Group \
                --requestheader-extra-headers-prefix X-Remote-Extra- --authorization-mode Node,RBAC \
                --enable-admission-plugins NodeRestriction --allow-privileged
            until_ready "$1" kubectl get --raw /readyz
            ;;
        kube-controller-manager)
            run "$1" kube-controller-manager --kubeconfig "$certificates/$1.conf" --use-service-account-credentials \
                --service-account-private-key-file "$key.key" --root-ca-file "$certificates/ca.crt" --leader-elect=false \
                --cluster-signing-cert-file "$certificates/ca.crt" --cluster-signing-key-file "$certificates/ca.key"
            ;;
        kube-scheduler) run "$1" kube-scheduler --kubeconfig "$certificates/$1.conf" --leader-elect=false ;;
        containerd)
            configure_containerd
            run containerd containerd --config /etc/containerd/config.toml
            until_ready containerd crictl info
            ;;
        crio)
            configure_crio
            # Without --config-dir, CRI-O reads other configurations too.
            run crio crio --config /etc/crio/crio.conf --config-dir ""
            until_ready crio crictl info
            ;;
        kubelet)
            configure_kubelet
            run kubelet kubelet --config /etc/kubernetes/kubelet.yaml --kubeconfig "$certificates/kubelet-node$NODE.conf" \
                --hostname-override "node$NODE" --node-ip "$address" --v=2
            ;;
        kube-proxy)
            run "$1" kube-proxy --kubeconfig "$certificates/kube-proxy.conf" --hostname-override "node$NODE" --proxy-mode iptables \
                --cluster-cidr 10.85.0.0/16 --conntrack-max-per-core 0 --conntrack-min 0 \
                --conntrack-tcp-timeout-established 0 --conntrack-tcp-timeout-close-wait 0
            ;;
        # Only stories start these.
        multus-daemon)
            mkdir -p /run/secrets/kubernetes.io/serviceaccount
            cp "$certificates/ca.crt" /run/secrets/kubernetes.io/serviceaccount
            kubectl create token --namespace kube-system multus --duration 24h >/run/secrets/kubernetes.io/serviceaccount/token
            run "$1" env KUBERNETES_SERVICE_HOST=192.168.77.2 KUBERNETES_SERVICE_PORT=6443 "MULTUS_NODE_NAME=node$NODE" \
                multus-daemon -config /etc/cni/multus-daemon.json
            ;;
        ztunnel) run "$1" /usr/bin/python3 hack/cluster/ztunnel.py /run/ztunnel/ztunnel.sock "$cluster/bin/sidecar" ;;
        *)
            echo "node.sh: unknown program \"$1\"; see hack/cluster.sh --help" >&2
            exit 2
            ;;
    esac
}

# stop NAME SIGNAL
stop() {
    local pid
    is_running "$1" || return 0
    pid=$(</run/programs/"$1")
    kill "-$2" "$pid"
    while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
    rm "/run/programs/$1"
}

command=$1
shift
if [[ $command == first ]]; then
    first
fi
signal=TERM
if [[ ${1:-} == --kill ]]; then
    signal=KILL
    shift
fi
programs=(etcd kube-apiserver kube-controller-manager kube-scheduler "$(<"$cluster/runtime")" kubelet kube-proxy)
[[ $NODE == 1 ]] || programs=("${programs[@]:4}")
[[ $# -eq 0 ]] || programs=("$@")
for program in "${programs[@]}"; do
    case $command in
        start) start "$program" ;;
        stop) stop "$program" "$signal" ;;
    esac
done
