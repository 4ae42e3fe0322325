#!/usr/bin/env bash
# Runs a container runtime with NRI on a simulated node: private process, mount and network namespaces, and its own
# directories. When standard input ends, it ends all processes of the node. With the same directory, the node starts
# again as after a power failure: /run is empty, all other files are still there.
#
# Usage: tests/runtimes/node.sh RUNTIME DIRECTORY
#   RUNTIME    containerd (2.2) or cri-o (1.34): hack/e2e.sh builds them
#   DIRECTORY  becomes the node's: net.d (/etc/cni/net.d; a bridge, unless it has a configuration), multus.d
#              (/etc/cni/multus/net.d), bin (/opt/cni/bin),
#              containerd.d (more configuration of containerd), image (the programs of the image), RUNTIME.log,
#              list.json (the bridge's configuration list), enter (runs a command on the node)
# Environment: TOOLS (default: target/tools of this repository)
set -euo pipefail
if [[ $# -lt 2 || $1 == -h || $1 == --help ]]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
    [[ ${1:-} == -h || ${1:-} == --help ]]
    exit
fi
runtime=$1
mkdir -p "$2"/{bin,net.d,multus.d,containerd.d,image,logs}
directory=$(realpath "$2")
repository=$(realpath "$(dirname "$0")/../..")
tools=${TOOLS:-$repository/target/tools}
image=detour.invalid/test:1
# Directories that a runtime's configuration can't move, and detour's state.
lasting=(/var/lib/cni /var/lib/containers)
volatile=(/run/containerd /run/crio /run/netns /run/detour /run/nri)

# pack: the image of all containers, as `docker save` would write it (Docker Image Specification v1.2).
pack() {
    local layer sources=$repository/tests/runtimes/image architecture
    cd "$directory/image"
    gcc -static -nostdlib -O1 -fno-stack-protector -fno-asynchronous-unwind-tables -o first "$sources/first.c"
    gcc -static -O1 -o traffic "$sources/traffic.c"
    tar -cf layer.tar first traffic
    layer=$(sha256sum layer.tar)
    case $(uname -m) in
        x86_64) architecture=amd64 ;;
        aarch64) architecture=arm64 ;;
        *) architecture=$(uname -m) ;;
    esac
    printf '{"architecture":"%s","os":"linux","config":{"Entrypoint":["/traffic","pause"]},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' \
        "$architecture" "${layer%% *}" >config.json
    printf '[{"Config":"config.json","RepoTags":["%s"],"Layers":["layer.tar"]}]' "$image" >manifest.json
    tar -cf image.tar manifest.json config.json layer.tar
    cd - >/dev/null
}

configure_network() {
    local plugin
    for plugin in bridge host-local loopback; do
        ln -sf "/usr/lib/cni/$plugin" "$directory/bin/$plugin"
    done
    [[ -z $(ls "$directory/net.d") ]] || return 0
    tee "$directory/list.json" >"$directory/net.d/10-net.conflist" <<EOF
{
  "cniVersion": "1.0.0", "name": "net",
  "plugins": [
    {
      "type": "bridge", "bridge": "cni0", "isGateway": true,
      "ipam": { "type": "host-local", "ranges": [ [ { "subnet": "10.85.0.0/16" } ], [ { "subnet": "fd00:85::/64" } ] ] }
    }
  ]
}
EOF
}

configure_containerd() {
    cat >"$directory/containerd.toml" <<EOF
version = 3
imports = ["$directory/containerd.d/*.toml"]
root = "$directory/root"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "native"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "$image"
[plugins."io.containerd.cri.v1.runtime"]
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["/opt/cni/bin"]
    conf_dir = "/etc/cni/net.d"
[plugins."io.containerd.nri.v1.nri"]
  disable = false
EOF
}

configure_crio() {
    printf '{"default":[{"type":"insecureAcceptAnything"}]}' >"$directory/policy.json"
    cat >"$directory/crio.toml" <<EOF
[crio]
root = "$directory/root"
runroot = "/run/crio/storage"
storage_driver = "vfs"
log_dir = "$directory/logs"
version_file = "/run/crio/version"
version_file_persist = ""
# Else, CRI-O deletes its images after a power failure.
clean_shutdown_file = ""
[crio.api]
stream_port = "0"
[crio.runtime]
default_runtime = "runc"
cgroup_manager = "cgroupfs"
conmon_cgroup = "pod"
pinns_path = "$tools/runtimes/pinns"
namespaces_dir = "/run/crio/ns"
container_exits_dir = "/run/crio/exits"
container_attach_socket_dir = "/run/crio"
apparmor_profile = "unconfined"
[crio.runtime.runtimes.runc]
runtime_path = "/usr/sbin/runc"
runtime_root = "/run/crio/runc"
monitor_path = "/usr/bin/conmon"
monitor_cgroup = "pod"
[crio.image]
pause_image = "$image"
pause_command = ""
signature_policy = "$directory/policy.json"
[crio.network]
network_dir = "/etc/cni/net.d"
plugin_dirs = ["/opt/cni/bin"]
[crio.nri]
enable_nri = true
EOF
    [[ -e $directory/root ]] ||
        skopeo --insecure-policy copy --quiet "docker-archive:$directory/image/image.tar" \
            "containers-storage:[vfs@$directory/root+/run/crio/storage]$image"
}

# first: the first process of the node.
first() {
    local path
    # Containers see mounts of network namespaces only below shared mounts, as systemd makes them.
    mount --make-rshared /
    for path in "${volatile[@]}"; do
        mount -t tmpfs -o mode=0755 tmpfs "$path"
    done
    for path in "${lasting[@]}"; do
        mkdir -p "$directory$path"
        mount --bind "$directory$path" "$path"
    done
    mount --bind "$directory/net.d" /etc/cni/net.d
    mount --bind "$directory/multus.d" /etc/cni/multus/net.d
    mount --bind "$directory/bin" /opt/cni/bin
    ip link set lo up
    # The address of the API server's Service.
    ip address add 10.96.0.1/32 dev lo
    export PATH=$tools/runtimes:$tools:$PATH
    exec 3>&1 >"$directory/$runtime.log" 2>&1
    case $runtime in
        containerd)
            configure_containerd
            containerd --config "$directory/containerd.toml" </dev/null &
            ;;
        cri-o)
            configure_crio
            # Without these, CRI-O reads the configuration of the machine.
            crio --config "$directory/crio.toml" --config-dir "" </dev/null &
            ;;
    esac
    echo $! >"$directory/runtime.pid"
    for ((i = 0; i < 600; i++)); do
        if crictl --runtime-endpoint "$endpoint" --image-endpoint "$endpoint" info >/dev/null 2>&1; then
            [[ $runtime != containerd || -n $(ctr --namespace k8s.io images list --quiet) ]] ||
                ctr --namespace k8s.io images import "$directory/image/image.tar"
            echo ready >&3
            exec 3>&-
            cat
            return
        fi
        sleep 0.1
    done
    echo "not ready within 60 s" >&3
    exit 1
}

case $runtime in
    containerd) endpoint=unix:///run/containerd/containerd.sock ;;
    cri-o) endpoint=unix:///run/crio/crio.sock ;;
    *)
        echo "node.sh: unknown runtime \"$runtime\"; expected containerd or cri-o" >&2
        exit 2
        ;;
esac
if [[ ${3:-} == first ]]; then
    first
    exit
fi
mkdir -p "${lasting[@]}" "${volatile[@]}" /etc/cni/net.d /etc/cni/multus/net.d /opt/cni/bin
if [[ ! -e $directory/image/image.tar ]]; then
    pack
    configure_network
fi
exec 4<&0
unshare --mount --net --pid --fork --kill-child --mount-proc "$0" "$runtime" "$directory" first <&4 &
unshare=$!
until child=$(cat "/proc/$unshare/task/$unshare/children" 2>/dev/null) && [[ -n $child ]]; do sleep 0.01; done
cat >"$directory/enter" <<EOF
#!/bin/sh
exec nsenter --target ${child% } --mount --net --pid -- env PATH="$tools/runtimes:$tools:$PATH" CONTAINER_RUNTIME_ENDPOINT=$endpoint \
    IMAGE_SERVICE_ENDPOINT=$endpoint "\$@"
EOF
chmod 0755 "$directory/enter"
wait "$unshare"
