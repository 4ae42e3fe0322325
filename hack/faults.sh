#!/usr/bin/env bash
# Runs the release binary under faults of the plugin, the node, the kernel, the API server, the agent and delegates.
# Prints the fault table: what each call answered, and what it left behind (docs/cost.md explains it). Exits with 1 if a
# row violates the contract. hack/test.sh runs a sample of the same tests.
#
# Usage: hack/faults.sh [NAME OF TESTS]…     for example: hack/faults.sh netns:: state::
# Environment: CYCLES (default 10000), FAULTS (all or sample, default all), DETOUR_PROGRAM (the binary; built if unset)
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh

need_root
need_commands gcc=build-essential strip=binutils ip=iproute2 nft=nftables iptables=iptables strace=strace \
    setpriv=util-linux prlimit=util-linux
need_rust
if [[ -z ${DETOUR_PROGRAM:-} ]]; then
    say "building the release binary"
    build_static release --bin detour
    DETOUR_PROGRAM=$(target_directory)/$target/release/detour
fi
export DETOUR_PROGRAM FAULTS=${FAULTS:-all} CYCLES=${CYCLES:-10000}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
say "building the tests"
cargo test --locked --no-run --test faults </dev/null
say "running the tests with $CYCLES cycles; the rows of a test appear when it ends"
status=0 began=$SECONDS
cargo test --locked --test faults -- --nocapture "$@" </dev/null 2>&1 | tee "$log" | while IFS= read -r line; do
    case $line in
        FAULT\|*VIOLATED*) printf '%s%s%s\n' "$red" "${line#FAULT|}" "$plain" ;;
        FAULT\|*) ;;
        test\ *\ ok) printf '%5d s  %s\n' "$((SECONDS - began))" "${line#test }" ;;
        *) printf '%s\n' "$line" ;;
    esac
done || status=1
rows() {
    sed -n 's/^.*FAULT|//p' "$log" | LC_ALL=C sort -t '|' -s -k 1,3
}
echo
say "$(rows | wc -l) rows after $(((SECONDS - began + 59) / 60)) minutes"
rows | column -t -s '|'
violated=$(rows | grep -c '|VIOLATED[^|]*$' || true)
if [[ $violated -gt 0 || $status -ne 0 ]]; then
    printf '%s%s rows violate the contract; the tests end with %s%s\n' "$red" "$violated" "$status" "$plain"
    exit 1
fi
say "each row satisfies the contract"
