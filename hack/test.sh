#!/usr/bin/env bash
# Runs the tests: all of them, or those that the arguments of cargo test select. Installs missing packages and tools
# first; a privilege or tool that can't be provided is an error.
#
# Usage: hack/test.sh [ARGUMENT OF cargo test]…
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh

need_root
need_commands gcc=build-essential ip=iproute2 iptables=iptables nft=nftables patch=patch strace=strace \
    nsenter=util-linux strip=binutils sysctl=procps /usr/lib/cni/bridge=containernetworking-plugins
need_rust
# needed_for TEST…: whether the arguments select one of these test programs, or no program. Tools that take minutes to
# build are built only for the tests that use them.
arguments="$*"
needed_for() {
    local test
    [[ $arguments != *--test* && $arguments != *--lib* && $arguments != *--bin* ]] && return
    for test in "$@"; do
        [[ $arguments != *"$test"* ]] || return 0
    done
    return 1
}
if needed_for chart release apiserver; then
    need_helm
fi
if needed_for chart; then
    need_commands promtool=prometheus
fi
if needed_for release; then
    need_commands git=git jq=jq skopeo=skopeo umoci=umoci docker-registry=docker-registry
    need_cosign
    need_cargo_deny
fi
if needed_for apiserver; then
    need_commands etcd=etcd-server setpriv=util-linux
    need_istio_charts
    need_istio_annotations
    need_apiserver
    need_multus
fi
if needed_for containerd; then
    need_commands containerd=containerd runc=runc
    need_crictl
fi
if needed_for containers; then
    need_nri_runtime
fi
say "building the traffic tool"
cargo build --locked --examples </dev/null
# Many tests wait for a timeout or a retry.
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-$((2 * $(nproc)))}
say "running the tests"
cargo test --locked "$@" </dev/null
