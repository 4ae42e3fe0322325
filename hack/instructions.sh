#!/usr/bin/env bash
# Counts what the plugin's calls cost, regardless of the load of the machine: instructions in user space, system calls,
# and the size of the binary. Fails if a count exceeds its limit in hack/bench/limits.json.
#
# Usage: hack/instructions.sh [--update]
#   --update         write the counts to the file of limits
#   DETOUR_PROGRAM   the binary to measure; default: build it
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh
# shellcheck source-path=SCRIPTDIR source=bench/scene.sh
source hack/bench/scene.sh

[[ $# -eq 0 || "$*" == --update ]] || die "expected no argument or --update, got \"$*\""
if [[ $target != x86_64-* ]]; then
    say "skipped: the limits are those of x86_64"
    exit
fi

# cost NAME COMMAND NAMESPACE CONF PROGRAM…: runs a call under a program that counts, and appends the count. The variable
# `tool` selects the program. Prints the result of the call.
cost() {
    local name=$1 command=$2 namespace=$3 conf=$4
    case $tool in
        callgrind)
            cni "$command" "$namespace" "$valgrind" --tool=callgrind --callgrind-out-file=/dev/null \
                --log-file="$work/log" "$detour" <"$work/$conf.conf"
            sed -n "s/.* Collected : \([0-9]*\)$/$name: instructions|\1/p" "$work/log" >>"$work/counts"
            ;;
        strace)
            cni "$command" "$namespace" "$setarch" -R "$strace" -f -c -o "$work/log" "$detour" <"$work/$conf.conf"
            awk -v name="$name" '$NF == "total" { print name ": system calls|" $4 }' "$work/log" >>"$work/counts"
            ;;
    esac
}

# costs CONF TITLE: the calls for one attachment.
costs() {
    cost "$2: ADD" ADD shop "$1" >"$work/$1.result"
    with_result "$1"
    cost "$2: ADD again" ADD shop "$1" >/dev/null
    cost "$2: CHECK" CHECK shop "$1-added"
    cost "$2: DEL" DEL shop "$1-added"
}

need_root
need_commands gcc=build-essential jq=jq ip=iproute2 openssl=openssl strace=strace unshare=util-linux valgrind=valgrind
need_rust
in_own_mounts "$@"
setarch=$(command -v setarch) strace=$(command -v strace) valgrind=$(command -v valgrind)
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
work=$(mktemp -d)

detour=${DETOUR_PROGRAM:-}
if [[ -z $detour ]]; then
    say "building the plugin (the first time: several minutes)"
    build_static release --bin detour
    detour="$(target_directory)/$target/release/detour"
fi
say "building the tools"
cargo build --locked --example probe --example measure </dev/null
probe="$(target_directory)/debug/examples/probe" measure="$(target_directory)/debug/examples/measure"

write_facts
start_api
start_agent
configure iptables agent iptables
configure nftables agent nftables
configure files files iptables
say "counting"
echo "binary: bytes|$(stat -c %s "$detour")" >"$work/counts"
# The first call on a node makes directories.
make_pods "$netns"
cni ADD shop "$detour" <"$work/files.conf" >/dev/null
cni DEL shop "$detour" <"$work/files.conf"
delete_pods "$netns"
for tool in callgrind strace; do
    make_pods "$netns"
    cost VERSION VERSION shop files >/dev/null
    cost "ADD, excluded namespace" ADD kube-system files >/dev/null
    delete_pods "$netns"
    for attachment in 'iptables|iptables' 'nftables|nftables' 'files|iptables, facts from files'; do
        make_pods "$netns"
        costs "${attachment%|*}" "${attachment#*|}"
        delete_pods "$netns"
    done
done
"$measure" limits hack/bench/limits.json "$work/counts" --compiler "$(rustc --version)" "$@"
