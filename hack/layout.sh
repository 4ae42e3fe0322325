#!/usr/bin/env bash
# Writes hack/plugin-functions.ld: the functions that calls of the plugin execute. The linker puts them next to each
# other. The kernel maps a file in pieces of 64 KiB, so that a call needs a third of the page faults and of the memory.
# Run it after large changes of the plugin; a missing or outdated function costs only its own page fault.
#
# Usage: hack/layout.sh [PROGRAM]    (default: a release build with symbols)
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh
# shellcheck source-path=SCRIPTDIR source=bench/scene.sh
source hack/bench/scene.sh

# record COMMAND NAMESPACE CONF: calls the plugin, and records the functions that it executes.
record() {
    cni "$1" "$2" "$valgrind" --tool=callgrind --demangle=no --log-file="$work/log" \
        --callgrind-out-file="$work/$1.$((++calls)).calls" "$detour" <"$work/$3.conf" >"$work/output" ||
        die "$1: $(<"$work/output")"
}

# functions CALLS…: prints patterns for the sections of all functions that these calls executed. A function's section is
# .text.NAME, or .text.unlikely.NAME of a cold one; musl has such sections too. Hashes in names differ from build to
# build. A function of which the linker has merged several copies has all their names.
functions() {
    sed -n "s/^c\\?fn=([0-9]*) \\([A-Za-z_][^ ']*\\).*$/\\1/p" "$@" >"$work/executed"
    awk 'NR == FNR { executed[$1]; next }
        { names[$1] = names[$1] " " $3 }
        $3 in executed { addresses[$1] }
        END { for (address in addresses) print names[address] }' "$work/executed" "$work/symbols" |
        tr ' ' '\n' | sed -n -E '/^_[ZR]/ {
            s/17h[0-9a-f]{16}E.*$/17h/; s/Cs[0-9A-Za-z]+_/Cs*_/g; s/^(.{100}).*/\1/; s/.*/*(.text*.&*)/p
        }
        /^_[ZR]/! s/^[A-Za-z_][0-9A-Za-z_]*$/*(.text.&)/p' | LC_ALL=C sort -u
}
need_root
need_commands gcc=build-essential jq=jq ip=iproute2 openssl=openssl unshare=util-linux valgrind=valgrind
need_rust
in_own_mounts "$@"
valgrind=$(command -v valgrind)
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
work=$(mktemp -d)

detour=${1:-}
if [[ -z $detour ]]; then
    say "building the plugin (the first time: several minutes)"
    CARGO_PROFILE_RELEASE_STRIP=false build_static release --bin detour
    detour=$(target_directory)/$target/release/detour
fi
say "building the tools"
cargo build --locked --example probe </dev/null
probe="$(target_directory)/debug/examples/probe"

write_facts
start_api
start_agent
calls=0
for source in agent files; do
    for dialect in iptables nftables; do
        configure "$source" "$source" "$dialect"
        make_pods "$netns"
        record VERSION shop "$source"
        record ADD kube-system "$source"
        record ADD shop "$source"
        mv "$work/output" "$work/$source.result"
        with_result "$source"
        for command in ADD CHECK DEL DEL; do
            record "$command" shop "$source-added"
        done
        delete_pods "$netns"
    done
done
nm "$detour" >"$work/symbols"
{
    echo "/* The functions that calls of the plugin execute, by hack/layout.sh: those of VERSION, then all. */"
    { functions "$work"/VERSION.*; functions "$work"/*.calls; } | awk '!printed[$0]++'
} >hack/plugin-functions.ld
say "hack/plugin-functions.ld: $(grep -c '^\*' hack/plugin-functions.ld) lines"
