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

need_root
need_commands ip=iproute2 jq=jq valgrind=valgrind
program=${1:-}
if [[ -z $program ]]; then
    need_rust
    say "building (the first time: several minutes)"
    CARGO_PROFILE_RELEASE_STRIP=false build_static release --bin detour
    program=$(target_directory)/$target/release/detour
fi
work=$(mktemp -d)
netns=detour-layout-$$
trap 'ip netns delete "$netns" 2>/dev/null || true; rm -rf "$work"' EXIT

mkdir "$work/manifests"
cat >"$work/manifests/pod.yaml" <<'EOF'
apiVersion: v1
kind: Pod
metadata:
  name: web-0
  namespace: shop
  annotations: { sidecar.istio.io/status: "{}", detour.io/exclude-uids: "1000" }
spec:
  containers:
  - { name: web, image: web, securityContext: { runAsUser: 1000650000 } }
  - { name: istio-proxy, image: proxy, args: [proxy, sidecar], securityContext: { runAsUser: 1337, runAsGroup: 1337 } }
---
apiVersion: v1
kind: Namespace
metadata: { name: shop, annotations: { openshift.io/sa.scc.uid-range: 1000650000/10000 } }
EOF

# call VERB DIALECT [EXCLUDED]: calls the plugin, and records the functions that it executes.
call() {
    local conf
    conf=$(jq --null-input --arg dialect "$2" --arg manifests "$work/manifests" --arg excluded "${3:-none}" '{
        cniVersion: "1.0.0", name: "istio-cni", type: "detour", dialect: $dialect,
        kubernetes: { manifests_dir: $manifests, exclude_namespaces: [$excluded] },
        chain: [{ type: "istio-redirect" }, { type: "uid-exclude", uids: ["7"] }, { type: "dns-exclude", uids: ["7"] }],
        prevResult: {
            cniVersion: "1.0.0", interfaces: [{ name: "eth0", sandbox: "x" }],
            ips: [{ address: "10.88.0.2/24", interface: 0 }]
        }
    }')
    CNI_COMMAND=$1 CNI_CONTAINERID=layout CNI_NETNS=/run/netns/$netns CNI_IFNAME=net1 CNI_PATH=/nonexistent \
        CNI_ARGS='K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0' \
        valgrind --tool=callgrind --demangle=no --callgrind-out-file="$work/$1.$((++calls)).calls" "$program" \
        <<<"$conf" >"$work/output" 2>&1 || die "$1: $(<"$work/output")"
}

calls=0
for dialect in iptables nftables; do
    ip netns add "$netns"
    ip -n "$netns" -batch - <<'EOF'
link set lo up
link add eth0 type veth peer name peer0
link set peer0 up
link set eth0 up
addr add 10.88.0.2/24 dev eth0
addr add fd88::2/64 dev eth0 nodad
EOF
    for verb in VERSION ADD ADD CHECK DEL DEL; do
        call "$verb" "$dialect"
    done
    ip netns delete "$netns"
done
ip netns add "$netns"
call ADD auto shop

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
nm "$program" >"$work/symbols"
{
    echo "/* The functions that calls of the plugin execute, by hack/layout.sh: those of VERSION, then all. */"
    { functions "$work"/VERSION.*; functions "$work"/*.calls; } | awk '!printed[$0]++'
} >hack/plugin-functions.ld
say "hack/plugin-functions.ld: $(grep -c '^\*' hack/plugin-functions.ld) lines"
