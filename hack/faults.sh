#!/usr/bin/env bash
# Runs the release binary under faults: each system call of an ADD fails once, or the process is killed before it; saved
# state, network namespaces, concurrent calls (docs/cost.md). hack/test.sh runs the same tests with one system call of
# each kind.
#
# Usage: hack/faults.sh [NAME OF TESTS]…     for example: hack/faults.sh faults::an_add
# Environment: DETOUR_PROGRAM (the binary; built if unset)
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh

need_root
need_commands gcc=build-essential strip=binutils ip=iproute2 nft=nftables iptables=iptables strace=strace \
    setpriv=util-linux
need_rust
if [[ -z ${DETOUR_PROGRAM:-} ]]; then
    say "building the release binary"
    build_static release --bin detour
    DETOUR_PROGRAM=$(target_directory)/$target/release/detour
fi
export DETOUR_PROGRAM FAULTS=all
say "running the tests"
cargo test --locked --test convergence -- "${@:-faults::}" </dev/null
