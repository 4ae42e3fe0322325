#!/usr/bin/env bash
# Counts what the plugin's calls cost, regardless of the load of the machine: instructions in user space, system calls,
# and the size of the binary. Fails if a count exceeds its limit in hack/bench/limits.json.
#
# Usage: hack/instructions.sh [--update]
#   --update         write the counts to the file of limits
#   DETOUR_PROGRAM   the binary to measure; default: build it
#   PROFILES         a directory: keep callgrind's profiles, for callgrind_annotate. They name functions if the binary
#                    was built with CARGO_PROFILE_RELEASE_STRIP=false.
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

# cost NAME COMMAND NAMESPACE CONF: runs a call under a program that counts, and appends the count. The variable `tool`
# selects the program.
cost() {
    local name=$1 command=$2 namespace=$3 conf=$work/$4.conf profile=/dev/null
    case $tool in
        callgrind)
            [[ -z ${PROFILES:-} ]] || profile="$PROFILES/$name.out"
            cni "$command" "$namespace" "$valgrind" --tool=callgrind --log-file="$work/log" \
                --callgrind-out-file="$profile" "$detour" <"$conf" >/dev/null
            sed -n "s/.* Collected : \([0-9]*\)$/$name: instructions|\1/p" "$work/log" >>"$work/counts"
            ;;
        # Without setarch -R, the distances between memory regions vary, and with them some counts.
        strace)
            cni "$command" "$namespace" "$setarch" -R "$strace" -f -c -o "$work/log" "$detour" <"$conf" >/dev/null
            awk -v name="$name" '$NF == "total" { print name ": system calls|" $4 }' "$work/log" >>"$work/counts"
            ;;
    esac
}

# costs CONF TITLE: the calls for one attachment.
costs() {
    cost "$2: ADD" ADD shop "$1"
    cost "$2: ADD again" ADD shop "$1"
    cost "$2: CHECK" CHECK shop "$1-added"
    cost "$2: DEL" DEL shop "$1-added"
}

need_root
need_commands gcc=build-essential jq=jq ip=iproute2 openssl=openssl strace=strace unshare=util-linux \
    valgrind=valgrind
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

# Not before the builds: /etc/resolv.conf can refer to /run.
hide /run /var/lib/cni/detour
write_facts
start_api
start_agent
configure iptables agent iptables
configure nftables agent nftables
configure files files iptables
say "counting"
echo "binary: bytes|$(stat -c %s "$detour")" >"$work/counts"
attachments=('iptables|iptables' 'nftables|nftables' 'files|iptables, facts from files')
# The result for the calls after an ADD. Besides, the first call on a node makes directories and is not measured.
for attachment in "${attachments[@]}"; do
    conf=${attachment%|*}
    make_pods "$netns"
    cni ADD shop "$detour" <"$work/$conf.conf" >"$work/$conf.result"
    with_result "$conf"
    cni DEL shop "$detour" <"$work/$conf-added.conf"
    delete_pods "$netns"
done
for tool in callgrind strace; do
    make_pods "$netns"
    cost VERSION VERSION shop files
    cost "ADD, excluded namespace" ADD kube-system files
    delete_pods "$netns"
    for attachment in "${attachments[@]}"; do
        make_pods "$netns"
        costs "${attachment%|*}" "${attachment#*|}"
        delete_pods "$netns"
    done
done
"$measure" limits hack/bench/limits.json "$work/counts" --compiler "$(rustc --version)" "$@"
