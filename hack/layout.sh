#!/usr/bin/env bash
# Writes the linker scripts in hack/layout: the sections of the binary that calls of the plugin use. The linker puts
# them next to each other. The kernel maps a file in pieces of 64 KiB, so that a call needs half of the page faults and of
# the memory. Run it after large changes of the plugin and before a release; a missing or outdated section costs only its
# own page fault.
#
# Usage: hack/layout.sh
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh
# shellcheck source-path=SCRIPTDIR source=bench/scene.sh
source hack/bench/scene.sh

# record COMMAND NAMESPACE CONF: calls the plugin, and records the addresses of the binary that it uses: instructions and
# data. Those of heap and stack are longer.
record() {
    cni "$1" "$2" "$valgrind" --tool=lackey --trace-mem=yes --log-file="$work/trace" "$detour" <"$work/$3.conf" \
        >"$work/output" || die "$1: $(<"$work/output")"
    calls=$((calls + 1))
    sed -n -E 's/^(I | [LSM]) +0*([0-9a-f]{6}),.*/\2/p' "$work/trace" | awk '!seen[$0]++' >"$work/$calls.used"
}

[[ $# -eq 0 ]] || die "expected no argument, got \"$*\""
need_root
need_commands gcc=build-essential jq=jq ip=iproute2 openssl=openssl unshare=util-linux valgrind=valgrind
need_rust
in_own_mounts "$@"
valgrind=$(command -v valgrind)
trap clean_up EXIT
work=$(mktemp -d)

say "building the plugin (the first time: several minutes)"
# Without it, cargo does not run the linker again, and there is no map.
touch src/main.rs
cargo rustc --locked --release --target "$target" --bin detour -- "-Clink-arg=-Map=$work/map" </dev/null
detour=$(target_directory)/$target/release/detour
say "building the tools"
cargo build --locked --example probe --example measure </dev/null
probe="$(target_directory)/debug/examples/probe" measure="$(target_directory)/debug/examples/measure"

# Not before the builds: /etc/resolv.conf can refer to /run.
hide /run /var/lib/cni/detour
write_facts
start_api
start_tls_api
start_agent
calls=0
for attachment in 'agent iptables' 'agent nftables' 'files iptables' 'tls iptables'; do
    say "tracing the calls: facts from ${attachment% *}, dialect ${attachment#* }"
    # shellcheck disable=SC2086 # source and dialect
    configure calls $attachment '.kubernetes.timeout_seconds = 300'
    make_pods "$netns"
    record VERSION shop calls
    record ADD kube-system calls
    record ADD shop calls
    mv "$work/output" "$work/calls.result"
    with_result calls
    for command in ADD CHECK DEL DEL; do
        record "$command" shop calls-added
    done
    delete_pods "$netns"
done
traces=()
for ((call = 1; call <= calls; call++)); do
    traces+=("$work/$call.used")
done
"$measure" layout "$work/map" hack/layout "${traces[@]}"
