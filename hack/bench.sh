#!/usr/bin/env bash
# Measures the cost of the plugin's calls, of a floor program that does only what no plugin can avoid, and of the tools
# that could apply the same rules. Prints medians, ratios and the targets of docs/cost.md.
#
# Each contender runs once per round in a fresh network namespace, in an order that rotates, so that noise affects all
# of them equally. Facts come from the agent unless the row names another source.
#
# Usage: hack/bench.sh [ROUNDS [FILTER]]     (default 30 rounds, all rows)
#   FILTER           an extended regular expression: measure the rows that match, and those they are compared with
#   DETOUR_PROGRAM   the binary to measure; default: build it
#   BENCH_TOOLS      a directory with measure, probe, floor and empty (static); default: build them
#   STORMS           how many storms of 100 pods (default: a fifth of the rounds)
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh
# shellcheck source-path=SCRIPTDIR source=bench/scene.sh
source hack/bench/scene.sh

rounds=${1:-30}
filter=${2:-}
storms=${STORMS:-$(((rounds + 4) / 5))}
bridge="dtb$$"
dialects='iptables nftables'
storm_pods=100

# Each list: a name, the size, a filter of jq that adds it to a configuration. Ranges are not adjacent, so that none of
# them are merged.
range='"\(. / 256 | floor).\(. % 256).0/25"'
lists() {
    local size
    for size in 10 100 1000; do
        echo "uids-$size|$size UIDs|.chain[1].uids = [range($size) | 20000 + 2 * .]"
    done
    for size in 10 100 1000; do
        echo "cidrs-$size|$size CIDRs|.chain[0].outbound_ip_ranges_exclude = [range($size) | \"10.\" + $range]"
    done
    for size in 10 2000; do
        echo "dns-$size|$size DNS ranges|.chain[2] = {type: \"dns-exclude\",
            resolvers: [range($size) | \"11.\" + $range]}" | paste -sd' '
    done
}

# The rows: CONTENDER|ROW|COMPARED WITH|TARGETS. A contender is a function below with its arguments. TARGETS limit CPU
# and wall time: a ratio (1.9x), a difference (+3ms) or an absolute value (150ms).
rows() {
    local dialect of list name title shortest growth each
    cat <<'EOF'
empty|an empty static program of the same size||
floor nothing|an empty transaction: floor program||
call VERSION|VERSION|an empty static program of the same size|cpu 2x
excluded iptables-api|ADD, excluded namespace|an empty static program of the same size|cpu 0.7ms
excluded plain|ADD, excluded namespace, with an agent|an empty static program of the same size|
plain|ADD, pod without a sidecar, with an agent|ADD, excluded namespace, with an agent|cpu 1.3x
EOF
    for dialect in $dialects; do
        of="$dialect: floor program"
        cat <<EOF
floor $dialect|$of||
lifecycle $dialect|$dialect: ADD|$of|cpu 1.9x, wall 2x
lifecycle $dialect|$dialect: ADD again|$of|
lifecycle $dialect|$dialect: CHECK|$dialect: ADD|cpu 1x
lifecycle $dialect|$dialect: DEL|$of|
second_attachment $dialect|$dialect: ADD, second attachment|$of|
add $dialect files|$dialect: ADD, facts from files|$of|
add $dialect api|$dialect: ADD, facts from an API|$of|
add $dialect tls|$dialect: ADD, facts from an API over TLS|$of|cpu +2.6ms
EOF
    done
    cat <<'EOF'
network bridge /usr/lib/cni/bridge|bridge alone: ADD||
network primary|primary, bridge and istio-cni: ADD|bridge alone: ADD|cpu +3ms
network primary-api|primary, facts from an API: ADD|bridge alone: ADD|
other nft|nft -f, both families|iptables: floor program|
other iptables-nft-restore|iptables-nft-restore, IPv4 only|iptables: floor program|
other ip6tables-nft-restore|ip6tables-nft-restore, IPv6 only|iptables: floor program|
EOF
    for dialect in $dialects; do
        while IFS='|' read -r name title _; do
            list="$dialect, $title" shortest="$dialect, 10 ${title#* }" growth='' each=''
            [[ $list != 'nftables, 1000 CIDRs' ]] || growth='cpu 3x, wall 3x'
            [[ $title != '2000 DNS ranges' ]] || each='wall 150ms'
            [[ $list != "$shortest" ]] || shortest=''
            cat <<EOF
floor $dialect-$name|$list: floor program|${shortest:+$shortest: floor program}|
lifecycle $dialect-$name|$list: ADD|${shortest:+$shortest: ADD}|$growth$each
lifecycle $dialect-$name|$list: ADD again|${shortest:+$shortest: ADD again}|$each
lifecycle $dialect-$name|$list: CHECK|${shortest:+$shortest: CHECK}|
lifecycle $dialect-$name|$list: DEL|${shortest:+$shortest: DEL}|$each
EOF
        done < <(lists)
    done
    for dialect in $dialects; do
        cat <<EOF
storm_of_floor $dialect|$dialect: storm of $storm_pods, floor program||
storm $dialect|$dialect: storm of $storm_pods, ADD|$dialect: storm of $storm_pods, floor program|cpu 2.2x, wall 2x
EOF
    done
}

# Prints the rows to measure.
selected_rows() {
    rows | awk -F'|' -v filter="$filter" '
        { line[NR] = $0; label[NR] = $2; base[NR] = $3; number[$2] = NR; if ($2 ~ filter) wanted[NR] = 1 }
        END {
            for (n = NR; n > 0; n--) if (wanted[n] && base[n] != "") wanted[number[base[n]]] = 1
            for (n = NR; n > 0; n--) if (wanted[n] && base[n] != "") wanted[number[base[n]]] = 1
            for (n = 1; n <= NR; n++) if (wanted[n]) print line[n]
        }'
}

write_configurations() {
    local dialect source name title change
    for dialect in $dialects; do
        configure "$dialect" agent "$dialect"
        configure "$dialect-redirect" agent "$dialect" '.chain |= .[:1]'
        configure "$dialect-exclude" agent "$dialect" '.chain |= .[1:] | .name = "excludedns"'
        for source in files api tls; do
            configure "$dialect-$source" "$source" "$dialect"
        done
        while IFS='|' read -r name title change; do
            configure "$dialect-$name" agent "$dialect" "$change"
        done < <(lists)
    done
    jq -n --arg bridge "$bridge" --arg data "$work/ipam" '{ cniVersion: "1.0.0", name: "bench", type: "bridge",
        bridge: $bridge, isDefaultGateway: true,
        ipam: { type: "host-local", subnet: "10.89.0.0/16", dataDir: $data } }' >"$work/bridge.conf"
    configure plain agent iptables '.runtimeConfig = { "io.kubernetes.cri.pod-annotations": {} }'
    local primary
    primary='del(.chain) | .name = "primary" | .cniDir = "'$work'/state" | .binDir = "/usr/lib/cni"
        | .delegates = ['$(<"$work/bridge.conf")']'
    configure primary agent iptables "$primary"
    configure primary-api api iptables "$primary"
}

# Records the transaction and the result of an ADD for the floor program, and its rules as input for other tools. nft
# can't read the CT target of iptables; an expression replaces it.
record() {
    local conf=$1
    make_pods "$netns"
    cni ADD shop "$strace" -f -o "$work/trace" -e trace=sendto,sendmsg -e raw=all -e write=all "$detour" \
        <"$work/$conf.conf" >"$work/$conf.result"
    "$measure" record "$work/trace" "$work/$conf.transaction"
    if [[ $conf == iptables ]]; then
        ip netns exec "$netns" iptables-save >"$work/rules.v4"
        ip netns exec "$netns" ip6tables-save >"$work/rules.v6"
        ip netns exec "$netns" nft list ruleset 2>/dev/null | sed 's/xt target "\?CT"\?/ct zone set 1/' >"$work/rules.nft"
        grep -q '^-A' "$work/rules.v4" || die "the ADD made no rules; expected rules to compare with"
    fi
    with_result "$conf"
    cni DEL shop "$detour" <"$work/$conf-added.conf"
    delete_pods "$netns"
}

# measured COMMAND NAMESPACE LABEL CONF [PROGRAM…]: measures a call of the plugin, or of another program.
measured() {
    local command=$1 namespace=$2 label=$3 conf=$4
    shift 4
    cni "$command" "$namespace" "$measure" run --label "$label" --out "$work/costs" --stdin "$work/$conf.conf" \
        -- "${@:-$detour}"
}

# unmeasured COMMAND CONF [PROGRAM]
unmeasured() {
    cni "$1" shop "${3:-$detour}" <"$work/$2.conf" >/dev/null
}

# The contenders. Each has a fresh network namespace.

empty() {
    "$measure" run --label "an empty static program of the same size" --out "$work/costs" -- "$empty"
}

call() {
    measured "$1" shop "$1" iptables-api
}

excluded() {
    local with=''
    [[ $1 == *-api ]] || with=', with an agent'
    measured ADD kube-system "ADD, excluded namespace$with" "$1"
    cni DEL kube-system "$detour" <"$work/$1.conf"
}

# The runtime passes the annotations, so only the agent is asked, and only whether the pod is in the ambient mesh.
plain() {
    measured ADD shop/plain "ADD, pod without a sidecar, with an agent" plain
    cni DEL shop/plain "$detour" <"$work/plain.conf"
}

# title_of CONF: prints how rows name a configuration.
title_of() {
    local dialect=${1%%-*} name=${1#*-}
    lists | awk -F'|' -v dialect="$dialect" -v name="$name" '
        $1 == name { title = ", " $2 }
        END { print (dialect == "nothing" ? "an empty transaction" : dialect title) }'
}

floor() {
    "$measure" run --label "$(title_of "$1"): floor program" --out "$work/costs" \
        -- "$floor" "/run/netns/$netns" "$work/$1.transaction" "$work/$1.result"
}

lifecycle() {
    local title
    title=$(title_of "$1")
    measured ADD shop "$title: ADD" "$1"
    measured ADD shop "$title: ADD again" "$1"
    measured CHECK shop "$title: CHECK" "$1-added"
    measured DEL shop "$title: DEL" "$1-added"
}

add() {
    local -A sources=([files]=files [api]='an API' [tls]='an API over TLS')
    measured ADD shop "$1: ADD, facts from ${sources[$2]}" "$1-$2"
    unmeasured DEL "$1-$2"
}

# An ADD of exclusions in a pod that another attachment redirects.
second_attachment() {
    unmeasured ADD "$1-redirect"
    measured ADD shop "$1: ADD, second attachment" "$1-exclude"
    unmeasured DEL "$1-exclude"
    unmeasured DEL "$1-redirect"
}

# network CONF [PROGRAM]: the plugin that makes the pod's network.
network() {
    local -A titles=([bridge]='bridge alone' [primary]='primary, bridge and istio-cni'
        [primary-api]='primary, facts from an API')
    ip -n "$netns" link delete eth0
    CNI_IFNAME_OF_CALL=eth0 measured ADD shop "${titles[$1]}: ADD" "$1" "${2:-$detour}"
    CNI_IFNAME_OF_CALL=eth0 unmeasured DEL "$1" "${2:-$detour}"
}

# other PROGRAM: another tool in the pod's network namespace, with the same rules.
other() {
    local label stdin=/dev/null program=("$1")
    case $1 in
        nft) label="nft -f, both families" program+=(-f "$work/rules.nft") ;;
        iptables-nft-restore) label="$1, IPv4 only" stdin=$work/rules.v4 ;;
        ip6tables-nft-restore) label="$1, IPv6 only" stdin=$work/rules.v6 ;;
    esac
    ip netns exec "$netns" "$measure" run --label "$label" --out "$work/costs" --stdin "$stdin" -- "${program[@]}"
}

# in_storm COMMAND CONF LABEL OUT PROGRAM…: runs a program for each of 100 pods, 8 at a time. The tool replaces {} by the
# number of the pod.
in_storm() {
    local command=$1 conf=$2 label=$3 out=$4
    shift 4
    netns="$netns-{}" cni "$command" shop "$measure" storm --label "$label" --out "$out" \
        --count "$storm_pods" --parallel 8 --stdin "$work/$conf.conf" -- "$@"
}

storm_of_floor() {
    in_storm ADD "$1" "$1: storm of $storm_pods, floor program" "$work/costs" \
        "$floor" "/run/netns/$netns-{}" "$work/$1.transaction" "$work/$1.result"
}

storm() {
    in_storm ADD "$1" "$1: storm of $storm_pods, ADD" "$work/costs" "$detour"
    in_storm DEL "$1" "clean-up" /dev/null "$detour"
}

need_root
need_commands gcc=build-essential jq=jq ip=iproute2 iptables-nft-restore=iptables nft=nftables openssl=openssl \
    strace=strace unshare=util-linux /usr/lib/cni/bridge=containernetworking-plugins
in_own_mounts "$@"
strace=$(command -v strace)
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
work=$(mktemp -d)

selected_rows >"$work/rows"
mapfile -t contenders < <(cut -d'|' -f1 "$work/rows" | awk '!seen[$0]++' | grep -v '^storm')
mapfile -t storm_contenders < <(cut -d'|' -f1 "$work/rows" | grep '^storm')
[[ -s $work/rows ]] || die "filter \"$filter\": no row matches; expected part of a row's name, for example \"CHECK\""

built="$(target_directory)/$target/release"
detour=${DETOUR_PROGRAM:-}
if [[ -z $detour ]]; then
    need_rust
    say "building the plugin (the first time: several minutes)"
    build_static release --bin detour
    detour="$built/detour"
fi
tools=${BENCH_TOOLS:-}
if [[ -z $tools ]]; then
    need_rust
    say "building the tools (the first time: several minutes)"
    build_static release --example probe --example measure --example floor
    tools="$built/examples"
    # The floor program's size is about that of an empty program without padding.
    EMPTY_PADDING=$(($(stat -c %s "$detour") - $(stat -c %s "$tools/floor"))) build_static release --example empty
fi
# Fresh copies, like the one that the agent writes: the cost of a program's page faults depends on how the kernel caches its
# file.
mkdir "$work/bin"
cp "$detour" "$work/bin/detour"
cp "$tools"/{empty,floor,measure,probe} "$work/bin"
detour="$work/bin/detour" probe="$work/bin/probe" measure="$work/bin/measure" floor="$work/bin/floor" empty="$work/bin/empty"

# Not before the builds: /etc/resolv.conf can refer to /run.
hide /run /var/lib/cni/detour
write_facts
start_api
start_tls_api
start_agent
write_configurations
: >"$work/costs"
# A row with a mistake fails now.
"$measure" table "$work/costs" --rows "$work/rows" >/dev/null
say "recording transactions"
# NFNL_MSG_BATCH_BEGIN and NFNL_MSG_BATCH_END for nf_tables, little-endian: a transaction without messages.
for kind in '\x10' '\x11'; do
    printf '\x14\0\0\0%b\0\1\0\1\0\0\0\0\0\0\0\0\0\0\x0a' "$kind"
done >"$work/nothing.transaction"
echo '{}' >"$work/nothing.result"
record iptables
record nftables
for contender in "${contenders[@]}"; do
    conf=${contender#* }
    if [[ ($contender == lifecycle* || $contender == floor*) && ! -e $work/$conf.transaction ]]; then
        record "$conf"
    fi
done

say "measuring: $rounds rounds of ${#contenders[@]} contenders, then ${#storm_contenders[@]} storms $storms times"
for ((round = 0; round < rounds && ${#contenders[@]} > 0; round++)); do
    for ((turn = 0; turn < ${#contenders[@]}; turn++)); do
        make_pods "$netns"
        # The words of a contender are its function and arguments.
        # shellcheck disable=SC2086
        ${contenders[(round + turn) % ${#contenders[@]}]}
        delete_pods "$netns"
    done
    echo "round $((round + 1)) of $rounds: $SECONDS s"
done
for ((round = 0; round < storms; round++)); do
    for contender in "${storm_contenders[@]}"; do
        mapfile -t pods < <(printf "$netns-%s\n" $(seq 0 $((storm_pods - 1))))
        make_pods "${pods[@]}"
        # shellcheck disable=SC2086
        $contender
        delete_pods "${pods[@]}"
    done
    [[ ${#storm_contenders[@]} -eq 0 ]] || echo "storm $((round + 1)) of $storms: $SECONDS s"
done
echo
"$measure" table "$work/costs" --rows "$work/rows"
echo
echo "rules applied: $(grep -hc '^-A' "$work/rules.v4" "$work/rules.v6" | paste -sd+ | sed 's/+/ (IPv4) + /; s/$/ (IPv6)/')"
echo "binary: $(stat -c %s "$detour") bytes, empty program: $(stat -c %s "$empty") bytes ($target)"
