#!/usr/bin/env bash
# Runs tests under containerd 2.2 and CRI-O 1.34, with real rules and real traffic, and prints a table of the results:
# containers that are excluded by name, boots of a node while the cluster CNI rewrites its plugin list, and live policy.
# Installs missing packages and builds the runtimes first (once, about five minutes).
# hack/test.sh does not run these tests, because the builds would take a fourth of its time. It uses Debian's
# containerd 1.6.
#
# Usage: hack/e2e.sh [NAME OF TESTS]…
# Environment: STARTS (container starts per runtime, default 1000), KILL_STARTS (container starts while the agent is
#              killed, default 200), RUNS (measured runs of the OCI hook, default 200), BOOTS (boots per runtime with an
#              agent, default 50; one tenth of this number for each of four cases without an agent), KEEP (if set: keep
#              the logs and configurations of the nodes in /tmp/detour-runtimes-*)
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh

need_root
need_commands gcc=build-essential strip=binutils jq=jq ip=iproute2 nft=nftables iptables=iptables curl=curl runc=runc \
    conmon=conmon skopeo=skopeo nsenter=util-linux /usr/lib/cni/bridge=containernetworking-plugins
need_rust
need_crictl
need_runtimes
say "building"
# A debug build of the agent would dominate the times.
build_static release --bin detour --example measure
built=$(target_directory)/$target/release
export DETOUR_PROGRAM=$built/detour MEASURE=$built/examples/measure
export STARTS=${STARTS:-1000} KILL_STARTS=${KILL_STARTS:-200} RUNS=${RUNS:-200} BOOTS=${BOOTS:-50}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
say "running the tests with $STARTS and $KILL_STARTS starts and $BOOTS boots (40 minutes with the defaults)"
status=0
cargo test --locked --test runtimes -- --nocapture --test-threads 1 "$@" </dev/null 2>&1 | tee "$log" || status=1
echo
say "results"
sed -n 's/^.*RESULT|//p' "$log" | sort -t '|' -s -k 1,1 | column -t -s '|'
exit "$status"
