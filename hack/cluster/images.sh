# The images of hack/cluster.sh: built from the programs of the tools directory and of the machine, without a container
# engine, and loaded into the runtimes. Source it; do not run it.
# shellcheck shell=bash
: "${tools:=}" "${cluster:=}" "${target:?source hack/machine.sh first}"

# archive_of IMAGE: prints the archive's path. An IMAGE is NAME or NAME:TAG.
archive_of() {
    echo "$tools/images/${1/:/-}.tar"
}

# make_images IMAGE…: builds the images' archives.
make_images() {
    local image name tag archive work=$tools/images/new
    for image in "$@"; do
        name=${image%%:*} tag=1
        [[ $name != detour ]] || tag=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
        [[ $image != *:* ]] || tag=${image#*:}
        archive=$(archive_of "$image")
        rm -rf "$work"
        mkdir -p "$work/files"
        case $name in
            detour) pack_detour "$work" "$tag" ;;
            pause) make_pause "$work/files" && pack "$work" pause "$tag" 65535:65535 /pause ;;
            tools) make_tools "$work/files" && pack "$work" tools "$tag" "" /bin/sh ;;
            pilot | proxyv2 | install-cni | multus)
                # These take long, and depend only on programs of fixed versions.
                [[ ! -e $archive ]] || continue
                make_tools "$work/files"
                "make_$name" "$work/files"
                ;;
            *) die "unknown image \"$name\"; expected pause, tools, detour, pilot, proxyv2, install-cni or multus" ;;
        esac
        case $name in
            pilot) pack "$work" pilot "$tag" 1337:1337 /usr/local/bin/pilot-discovery ;;
            proxyv2) pack "$work" proxyv2 "$tag" 1337:1337 /usr/local/bin/pilot-agent ;;
            install-cni) pack "$work" install-cni "$tag" "" /usr/local/bin/install-cni ;;
            multus) pack "$work" multus "$tag" "" /usr/src/multus-cni/bin/multus-daemon ;;
        esac
        mv "$work/archive.tar" "$archive"
        rm -rf "$work"
    done
}

# pack DIRECTORY NAME TAG USER PROGRAM: packs DIRECTORY/files as `docker save` would (Docker Image Specification v1.2).
pack() {
    local sum
    tar -C "$1/files" --owner 0 --group 0 --numeric-owner --sort=name --mtime=@0 -cf "$1/layer.tar" .
    sum=$(sha256sum "$1/layer.tar")
    jq --null-input --arg architecture "$(architecture)" --arg user "$4" --arg program "$5" --arg sum "sha256:${sum%% *}" '{
        $architecture, os: "linux", rootfs: { type: "layers", diff_ids: [$sum] },
        config: { User: $user, Entrypoint: [$program], Env: ["PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"] }
    }' >"$1/config.json"
    jq --null-input --arg name "localhost/$2:$3" \
        '[{ Config: "config.json", RepoTags: [$name], Layers: ["layer.tar"] }]' >"$1/manifest.json"
    tar -C "$1" -cf "$1/archive.tar" manifest.json config.json layer.tar
}

# pack_detour DIRECTORY TAG: detour's image, as hack/image.sh builds it.
pack_detour() {
    local program=${DETOUR_PROGRAM:-}
    if [[ -z $program ]]; then
        need_rust
        say "building detour (several minutes)"
        build_static release --bin detour
        program=$(target_directory)/$target/release/detour
    fi
    cp "$program" "$1/detour-$(architecture)"
    hack/image.sh --arch "$(architecture)" --binaries "$1" --output "$1/layout" "$2" >/dev/null
    skopeo copy --quiet "oci:$1/layout:$2" "docker-archive:$1/archive.tar:localhost/detour:$2"
}

make_pause() {
    gcc -xc - -static -O1 -s -o "$1/pause" <<'EOF'
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
static void end(int signal) { (void)signal; _exit(0); }
static void reap(int signal) { (void)signal; while (waitpid(-1, 0, WNOHANG) > 0); }
int main(void) {
    signal(SIGTERM, end);
    signal(SIGINT, end);
    signal(SIGCHLD, reap);
    for (;;) pause();
}
EOF
}

# busybox, and a stand-in for the sidecar.
make_tools() {
    local name
    mkdir -p "$1"/{bin,tmp,etc,root,var,usr/local/bin}
    chmod 1777 "$1/tmp"
    ln -s /run "$1/var/run"
    mkdir "$1/run"
    cp -L "$(command -v busybox)" "$1/bin/busybox"
    ! ldd "$1/bin/busybox" &>/dev/null || die "busybox is not static: install the package busybox-static"
    for name in $("$1/bin/busybox" --list); do
        [[ $name == busybox ]] || ln -s busybox "$1/bin/$name"
    done
    printf 'root:x:0:0:root:/root:/bin/sh\nistio-proxy:x:1337:1337::/:/bin/sh\n' >"$1/etc/passwd"
    printf 'root:x:0:\nistio-proxy:x:1337:\n' >"$1/etc/group"
    gcc -static -O1 -s -o "$1/bin/sidecar" hack/cluster/sidecar.c
    install -m 0755 hack/cluster/report.sh "$1/bin/report"
}

# copy_programs DIRECTORY PROGRAM…: copies programs into DIRECTORY/usr/local/bin, with their libraries.
copy_programs() {
    local directory=$1 program library
    shift
    for program in "$@"; do
        cp -L "$program" "$directory/usr/local/bin/"
        for library in $(ldd "$program" 2>/dev/null | grep -o '/[^ ]*' | sort -u); do
            mkdir -p "$directory$(dirname "$library")"
            cp -L --update "$library" "$directory$library"
        done
    done
}

make_pilot() {
    need_istio pilot-discovery
    copy_programs "$1" "$tools/runtimes/pilot-discovery"
}

# Istio's agent with Envoy from PyPI: upstream's build, without Istio's own filters.
make_proxyv2() {
    local module
    need_istio pilot-agent
    need_envoy
    copy_programs "$1" "$tools/runtimes/pilot-agent" "$tools/envoy"
    mkdir -p "$1/var/lib/istio/envoy" "$1/etc/istio/proxy"
    module=$(cd tests/runtimes/istio-cni && go list -m -f '{{.Dir}}' istio.io/istio)
    cp "$module/tools/packaging/common/envoy_bootstrap.json" "$1/var/lib/istio/envoy/envoy_bootstrap_tmpl.json"
    # The agent runs as any user.
    chmod -R a+rwX "$1/var/lib/istio" "$1/etc/istio"
}

make_install-cni() {
    local name
    need_istio install-cni istio-cni
    mkdir -p "$1/opt/cni/bin" "$1/usr/lib" "$1/usr/sbin"
    copy_programs "$1" "$tools/runtimes/install-cni" "$tools/runtimes/istio-cni" /usr/sbin/xtables-nft-multi /usr/sbin/nft
    mv "$1/usr/local/bin/istio-cni" "$1/opt/cni/bin/"
    cp -r --parents /usr/lib/*/xtables "$1"
    for name in {iptables,ip6tables}{,-save,-restore}; do
        ln -s xtables-nft-multi "$1/usr/local/bin/$name"
        ln -s xtables-nft-multi "$1/usr/local/bin/${name/tables/tables-nft}"
    done
}

make_multus() {
    need_thick_multus
    mkdir -p "$1/usr/src/multus-cni/bin"
    cp "$tools"/runtimes/multus-{daemon,shim} "$tools/runtimes/passthru" "$1/usr/src/multus-cni/bin/"
}

# load IMAGE…: loads archives into each node.
load() {
    local image archive node name
    for image in "$@"; do
        archive=$(archive_of "$image")
        for node in "$cluster"/node*/; do
            node=$(basename "$node" | tr -cd 0-9)
            if [[ $(<"$cluster/runtime") == containerd ]]; then
                enter "$node" ctr --namespace k8s.io images import --snapshotter overlayfs "$archive" &>/dev/null ||
                    die "node $node: import of $archive failed"
            else
                name=$(tar -xOf "$archive" manifest.json | jq -r '.[0].RepoTags[0]')
                enter "$node" skopeo --insecure-policy copy --quiet "docker-archive:$archive" \
                    "containers-storage:[vfs@$cluster/node$node/data/crio+/run/crio/storage]$name"
            fi
        done
    done
}

# The name of this machine's architecture in images.
architecture() {
    case $(uname -m) in
        x86_64) echo amd64 ;;
        aarch64) echo arm64 ;;
        *) die "architecture $(uname -m): expected x86_64 or aarch64" ;;
    esac
}
