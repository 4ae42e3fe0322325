#!/usr/bin/env bash
# Runs all tests. What they need and is missing is installed first; what can't be had is an error.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh

need_root
need_commands gcc=build-essential ip=iproute2 iptables=iptables nft=nftables strace=strace \
    /usr/lib/cni/bridge=containernetworking-plugins
need_rust
say "running all tests"
cargo test --locked "$@" </dev/null
