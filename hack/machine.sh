# What the scripts beside this one need of the machine. Sourced, never run.
# shellcheck shell=bash

# The static binary's target: this machine's, until build_for says otherwise.
target="$(uname -m)-unknown-linux-musl"
# What runs a binary of it, where this machine doesn't.
emulator=''
: "$emulator"
# ring's C parts are compiled by the machine's own gcc.
export "CC_${target//-/_}=gcc"

export PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"

if [[ -t 1 && -z "${NO_COLOR:-}" ]]; then
    bold=$'\e[1m' green=$'\e[32m' red=$'\e[31m' plain=$'\e[0m'
else
    bold='' green='' red='' plain=''
fi
# Not every script uses every colour.
: "$green" "$red"

say() {
    printf '%s==> %s%s\n' "$bold" "$*" "$plain"
}

die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

need_root() {
    [[ $(id -u) -eq 0 ]] || die "network namespaces and rules need root"
}

# need_commands COMMAND=PACKAGE…: installs the packages of those that are missing.
need_commands() {
    local pair missing=() services
    for pair in "$@"; do
        command -v "${pair%%=*}" >/dev/null || missing+=("${pair#*=}")
    done
    [[ ${#missing[@]} -gt 0 ]] || return 0
    command -v apt-get >/dev/null || die "install ${missing[*]} first: there is no apt-get here"
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq </dev/null
    without_services apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >/dev/null
    # Nor with the next boot.
    mapfile -t services < <(dpkg -L "${missing[@]}" | sed -n 's|.*/systemd/system/\([^/@]*\.service\)$|\1|p')
    if [[ ${#services[@]} -gt 0 ]] && command -v systemctl >/dev/null; then
        systemctl disable --quiet "${services[@]}"
    fi
}

# without_services COMMAND…: runs what installs packages, and has none of their services started: etcd's
# and containerd's are not for tests (invoke-rc.d(8), policy-rc.d).
without_services() (
    policy=/usr/sbin/policy-rc.d
    if [[ ! -e $policy ]]; then
        trap 'rm -f "$policy"' EXIT
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 0755 "$policy"
    fi
    "$@"
)

# Cargo and the static target.
need_rust() {
    if ! command -v cargo >/dev/null; then
        command -v rustup >/dev/null || die "neither cargo nor rustup is here: install rustup (https://rustup.rs)"
        say "installing the stable Rust toolchain"
        rustup toolchain install stable --profile minimal </dev/null
        rustup default stable
    fi
    if command -v rustup >/dev/null; then
        rustup target add "$target" </dev/null
    elif [[ ! -d "$(rustc --print target-libdir --target "$target")" ]]; then
        die "this Rust has no target $target, and there is no rustup to add it"
    fi
}

# build_for ARCHITECTURE: makes that the target, named as images name it, and gets what compiles for it
# and runs it.
build_for() {
    local machine prefix variable
    case $1 in
        amd64) machine=x86_64 ;;
        arm64) machine=aarch64 ;;
        *) die "$1: the architectures are amd64 and arm64" ;;
    esac
    target="$machine-unknown-linux-musl" emulator=''
    if [[ $machine != "$(uname -m)" ]]; then
        prefix="$machine-linux-gnu"
        # The C++ compiler stands for all of the package: a C compiler may be here without headers.
        emulator="qemu-$machine"
        need_commands "$prefix-g++=crossbuild-essential-$1" "$emulator=qemu-user"
        variable=${target//-/_}
        export "CC_$variable=$prefix-gcc" "CARGO_TARGET_${variable^^}_LINKER=$prefix-gcc"
    fi
    need_rust
}

# need_components COMPONENT…: of the Rust toolchain; one that has no rustup must have them already.
need_components() {
    if command -v rustup >/dev/null; then
        rustup component add "$@" </dev/null
    fi
}

# build_static [--example NAME]…: what cargo builds by release profile for the static target.
build_static() {
    cargo build --locked --release --target "$target" "$@" </dev/null
}

# Where cargo puts what it builds.
target_directory() {
    cargo metadata --locked --no-deps --format-version 1 | sed -E 's/.*"target_directory":"([^"]+)".*/\1/'
}

# Where tools are that are built here: nobody packages them, or not in the version that is needed.
tools_directory() {
    echo "$(target_directory)/tools"
}

# A Go for what is built here. Distributions' own are often too old for it.
need_go() {
    command -v go >/dev/null || die "building $1 needs Go 1.25 or later (https://go.dev/dl)"
}

need_helm() {
    local tools version=v3.19.0
    tools=$(tools_directory)
    [[ ! -x $tools/helm ]] || return 0
    need_go helm
    say "building helm $version (a minute)"
    # In place only when it is whole.
    GOBIN="$tools/new" go install -ldflags '-s -w' "helm.sh/helm/v3/cmd/helm@$version" </dev/null
    mv "$tools/new/helm" "$tools/helm"
}

# What calls plugins as a runtime does, by libcni.
need_cnitool() {
    [[ ! -x ~/go/bin/cnitool ]] && ! command -v cnitool >/dev/null || return 0
    need_go cnitool
    say "building cnitool"
    GOBIN=~/go/bin go install github.com/containernetworking/cni/cnitool@v1.3.0 </dev/null
}

# The API server of the tests, in the version that its go.mod names.
need_apiserver() {
    local module=tests/apiserver/kube-apiserver
    need_module "$module" "$(sed -n 's/.*k8s.io\/kubernetes \(v[0-9.]*\).*/\1/p' "$module/go.mod")" \
        "four minutes on two cores" k8s.io/kubernetes/cmd/kube-apiserver k8s.io/component-base/version.gitVersion
}

# What asks containerd for pods, in the version that its go.mod names.
need_crictl() {
    local module=tests/containerd/crictl
    need_module "$module" "$(sed -n 's/.*=> sigs.k8s.io\/cri-tools v\([0-9.]*\).*/\1/p' "$module/go.mod")" \
        "a minute" github.com/kubernetes-sigs/cri-tools/cmd/crictl github.com/kubernetes-sigs/cri-tools/pkg/version.Version
}

# need_module DIRECTORY VERSION TIME PACKAGE VARIABLE: builds a package that a Go module beside the tests
# requires; the variable is where it keeps its version.
need_module() {
    local directory=$1 version=$2 duration=$3 package=$4 variable=$5 tools program
    tools=$(tools_directory)
    program=$tools/$(basename "$directory")
    [[ ! -x $program || $("$program" --version) != *" $version" ]] || return 0
    need_go "$(basename "$directory")"
    say "building $(basename "$directory") $version ($duration)"
    mkdir -p "$tools"
    (cd "$directory" && go build -trimpath -o "$program.new" -ldflags "-s -w -X $variable=$version" "$package" </dev/null)
    mv "$program.new" "$program"
}
