#!/usr/bin/env bash
# Measures the cost of one plugin call, and of the tools that could apply the same rules. Each run has a fresh network
# namespace; the figures are medians. Each contender runs once per round, so that noise affects all of them equally.
#
# Usage: hack/bench.sh [ROUNDS]     (default 30)
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh

rounds=${1:-30}
netns="detour-bench-$$"
bridge="dtb$$"
work=''
api=''
agent=''

clean_up() {
    local status=$?
    trap - EXIT
    trap '' INT TERM
    local process
    for process in $agent $api; do
        kill "$process" 2>/dev/null || true
        wait "$process" 2>/dev/null || true
    done
    if [[ -e /run/netns/$netns ]]; then
        ip netns delete "$netns" || true
    fi
    ip link delete "$bridge" 2>/dev/null || true
    if [[ -n $work ]]; then
        rm -rf "$work"
    fi
    exit "$status"
}

make_pod_netns() {
    ip netns add "$netns"
    ip -n "$netns" -batch - <<EOF
link set lo up
link add eth0 type veth peer name peer0
link set peer0 up
link set eth0 up
addr add 10.88.0.2/24 dev eth0
addr add fd88::2/64 dev eth0 nodad
EOF
}

pod_uid=8e5bd6a4-9a35-4f0e-9d2b-1c33a5b0a001
pod='{
  "apiVersion": "v1", "kind": "Pod",
  "metadata": {
    "name": "web-0", "namespace": "shop", "uid": "'$pod_uid'",
    "annotations": { "sidecar.istio.io/status": "{}", "k8s.v1.cni.cncf.io/networks": "default/istio-cni" }
  },
  "spec": {
    "nodeName": "node-1",
    "initContainers": [ { "name": "vault-agent-init", "image": "vault", "securityContext": { "runAsUser": 1337 } } ],
    "containers": [
      { "name": "web", "image": "web", "securityContext": { "runAsUser": 1000650000 } },
      {
        "name": "istio-proxy", "image": "proxyv2", "args": [ "proxy", "sidecar" ],
        "env": [ { "name": "ISTIO_META_DNS_CAPTURE", "value": "true" } ],
        "securityContext": { "runAsUser": 1000659999, "runAsGroup": 1000659999 }
      }
    ]
  }
}'
namespace='{
  "apiVersion": "v1", "kind": "Namespace",
  "metadata": { "name": "shop", "annotations": { "openshift.io/sa.scc.uid-range": "1000650000/10000" } }
}'

# conf FILE KEY VALUE: writes the plugin's configuration.
conf() {
    cat >"$work/$1" <<EOF
{
  "cniVersion": "1.0.0", "name": "istio-cni", "type": "detour", "log_level": "error", "dialect": "iptables",
  "kubernetes": { "$2": "$3", "exclude_namespaces": ["kube-system"] },
  "chain": [
    { "type": "istio-redirect" },
    { "type": "uid-exclude", "uids": ["1337"] },
    { "type": "dns-exclude", "uids": ["1337"] }
  ]
}
EOF
}

write_files() {
    mkdir -p "$work/manifests" "$work/api/api/v1/namespaces/shop/pods"
    tee "$work/manifests/pod.json" >"$work/api/api/v1/namespaces/shop/pods/web-0.json" <<<"$pod"
    tee "$work/manifests/namespace.json" >"$work/api/api/v1/namespaces/shop.json" <<<"$namespace"
    conf manifests.conf manifests_dir "$work/manifests"
    conf api.conf kubeconfig "$work/kubeconfig"
    jq --arg socket "$work/node/agent.sock" '.kubernetes.agent_socket = $socket' "$work/api.conf" >"$work/agent.conf"
    jq '{ metadata: { resourceVersion: "1" }, items: [ . ] }' <<<"$pod" >"$work/api/api/v1/pods.json"
    jq '{ metadata: { resourceVersion: "1" }, items: [ . ] }' <<<"$namespace" >"$work/api/api/v1/namespaces.json"
    jq '.dialect = "nftables"' "$work/manifests.conf" >"$work/native.conf"
    jq '.chain |= .[:1]' "$work/manifests.conf" >"$work/redirect.conf"
    mkdir -p "$work/api/api/v1/namespaces/shop/pods/web-0" \
        "$work/api/apis/k8s.cni.cncf.io/v1/namespaces/default/network-attachment-definitions"
    tee "$work/api/api/v1/namespaces/shop/pods/web-0/status.json" >"$work/api/api/v1/namespaces/shop/events.json" <<<'{}'
    jq -n '{ apiVersion: "k8s.cni.cncf.io/v1", kind: "NetworkAttachmentDefinition",
        metadata: { name: "istio-cni", namespace: "default" },
        spec: { config: "{\"cniVersion\":\"0.3.1\",\"name\":\"istio-cni\",\"type\":\"istio-cni\"}" } }' \
        >"$work/api/apis/k8s.cni.cncf.io/v1/namespaces/default/network-attachment-definitions/istio-cni.json"
    jq -n --arg bridge "$bridge" --arg data "$work/ipam" '{ cniVersion: "1.0.0", name: "bench", type: "bridge",
        bridge: $bridge, isDefaultGateway: true,
        ipam: { type: "host-local", subnet: "10.89.0.0/16", dataDir: $data } }' >"$work/bridge.conf"
    jq --slurpfile bridge "$work/bridge.conf" --arg state "$work/state" 'del(.chain) |
        .name = "primary" | .delegates = $bridge | .cniDir = $state | .binDir = "/usr/lib/cni"' \
        "$work/api.conf" >"$work/primary.conf"
    jq '.chain |= .[1:] | .name = "excludedns"' "$work/manifests.conf" >"$work/exclude.conf"
    printf 'fn main() {}\n' >"$work/empty.rs"
    rustc --target "$target" -O -C strip=symbols -o "$work/empty" "$work/empty.rs"
}

start_api() {
    local ready='' address
    mkfifo "$work/alive" "$work/ready"
    exec 3<>"$work/alive"
    "$probe" api "$work/api" <"$work/alive" >"$work/ready" 3>&- &
    api=$!
    read -r -t 10 ready address <"$work/ready" || true
    [[ $ready == ready ]] || die "API server of the test: not ready within 10 s"
    cat >"$work/kubeconfig" <<EOF
{
  "apiVersion": "v1", "kind": "Config", "current-context": "bench",
  "clusters": [ { "name": "bench", "cluster": { "server": "http://$address" } } ],
  "users": [ { "name": "bench", "user": { "token": "bench" } } ],
  "contexts": [ { "name": "bench", "context": { "cluster": "bench", "user": "bench" } } ]
}
EOF
}

# Starts the node agent and waits until it has read the pod and its namespace.
start_agent() {
    local line server left=3
    mkdir -p "$work/node/etc/cni/net.d" "$work/account"
    printf bench >"$work/account/token"
    # A placeholder: the API server is reached by plain HTTP.
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout /dev/null \
        -subj /CN=bench -days 1 -out "$work/account/ca.crt" 2>/dev/null
    server=$(jq -r '.clusters[0].cluster.server' "$work/kubeconfig")
    mkfifo "$work/said"
    env -i "$detour" agent --platform openshift --root "$work/node" --socket /agent.sock --node-name node-1 \
        --service-account "$work/account" --api-server "$server" 2>"$work/said" &
    agent=$!
    exec 4<"$work/said"
    while ((left > 0)); do
        read -r -t 10 line <&4 || die "agent: not ready within 10 s"
        case $line in *'watching pods'* | *'watching namespaces'* | *"serving the plugin's"*) left=$((left - 1)) ;; esac
    done
    # Keep reading, so that the agent never waits for a full pipe.
    cat <&4 >/dev/null &
    exec 4<&-
}

# cni COMMAND NAMESPACE PROGRAM…: runs a program with the environment in which Multus runs the plugin.
cni() {
    local command=$1 arguments="K8S_POD_NAMESPACE=$2;K8S_POD_NAME=web-0;K8S_POD_INFRA_CONTAINER_ID=$netns;K8S_POD_UID=$pod_uid"
    shift 2
    env -i PATH= \
        CNI_COMMAND="$command" CNI_CONTAINERID="$netns" CNI_NETNS="/var/run/netns/$netns" CNI_IFNAME="${CNI_IFNAME_OF_CALL:-net1}" \
        CNI_PATH=/opt/cni/bin:/usr/lib/cni CNI_ARGS="IgnoreUnknown=true;$arguments;IgnoreUnknown=1;$arguments" "$@"
}

# Saves the rules of an ADD as input for the other tools. nft can't read the CT target of iptables; an expression
# replaces it.
record_rules() {
    make_pod_netns
    cni ADD shop "$detour" <"$work/manifests.conf" >/dev/null
    ip netns exec "$netns" iptables-save >"$work/rules.v4"
    ip netns exec "$netns" ip6tables-save >"$work/rules.v6"
    ip netns exec "$netns" nft list ruleset 2>/dev/null | sed 's/xt target "\?CT"\?/ct zone set 1/' >"$work/rules.nft"
    grep -q '^-A' "$work/rules.v4" || die "the ADD made no rules; expected rules to compare with"
    cni DEL shop "$detour" <"$work/manifests.conf"
    ip netns delete "$netns"
}

# run LABEL STDIN PROGRAM…: measures a program in this network namespace.
run() {
    local label=$1 stdin=$2
    shift 2
    "$measure" run --label "$label" --out "$work/costs" --stdin "$stdin" -- "$@"
}

# run_inside LABEL STDIN PROGRAM…: measures a program in the pod's network namespace.
run_inside() {
    local label=$1 stdin=$2
    shift 2
    ip netns exec "$netns" "$measure" run --label "$label" --out "$work/costs" --stdin "$stdin" -- "$@"
}

# add LABEL CONF NAMESPACE: measures an ADD. The DEL that removes its state is not measured.
add() {
    cni ADD "$3" "$measure" run --label "$1" --out "$work/costs" --stdin "$work/$2" -- "$detour"
    cni DEL "$3" "$detour" <"$work/$2"
}

# after_add LABEL COMMAND: measures a call for an attachment that was added before. It gets the result of ADD.
after_add() {
    cni ADD shop "$detour" <"$work/manifests.conf" >"$work/result.json"
    jq --slurpfile result "$work/result.json" '.prevResult = $result[0]' "$work/manifests.conf" >"$work/added.conf"
    cni "$2" shop "$measure" run --label "$1" --out "$work/costs" --stdin "$work/added.conf" -- "$detour"
    cni DEL shop "$detour" <"$work/manifests.conf"
}

# second_attachment LABEL: measures an ADD of exclusions in a pod that another attachment redirects.
second_attachment() {
    cni ADD shop "$detour" <"$work/redirect.conf" >/dev/null
    cni ADD shop "$measure" run --label "$1" --out "$work/costs" --stdin "$work/exclude.conf" -- "$detour"
    cni DEL shop "$detour" <"$work/exclude.conf"
    cni DEL shop "$detour" <"$work/redirect.conf"
}

# network LABEL CONF PROGRAM: measures the plugin that makes the pod's network.
network() {
    ip -n "$netns" link delete eth0
    CNI_IFNAME_OF_CALL=eth0 cni ADD shop "$measure" run --label "$1" --out "$work/costs" --stdin "$work/$2" -- "$3"
    CNI_IFNAME_OF_CALL=eth0 cni DEL shop "$3" <"$work/$2"
}

contenders=16

# contend NUMBER: runs one contender in a fresh network namespace.
contend() {
    case $1 in
        0) add "detour ADD, facts from an API" api.conf shop ;;
        1) add "detour ADD, facts from files" manifests.conf shop ;;
        2) add "detour ADD, excluded namespace" api.conf kube-system ;;
        3) cni VERSION shop "$measure" run --label "detour VERSION" --out "$work/costs" --stdin "$work/api.conf" -- "$detour" ;;
        4) after_add "detour CHECK" CHECK ;;
        5) after_add "detour DEL" DEL ;;
        6) after_add "detour ADD again, unchanged" ADD ;;
        7) second_attachment "detour ADD, second attachment" ;;
        8) run_inside "nft -f, both families" /dev/null nft -f "$work/rules.nft" ;;
        9) run_inside "iptables-nft-restore, IPv4 only" "$work/rules.v4" iptables-nft-restore ;;
        10) run_inside "ip6tables-nft-restore, IPv6 only" "$work/rules.v6" ip6tables-nft-restore ;;
        11) add "detour ADD, native rules" native.conf shop ;;
        12) network "bridge alone, ADD" bridge.conf /usr/lib/cni/bridge ;;
        13) network "detour primary, bridge and istio-cni, ADD" primary.conf "$detour" ;;
        14) add "detour ADD, facts from the agent" agent.conf shop ;;
        15) run "an empty static program" /dev/null "$work/empty" ;;
    esac
}

need_root
need_commands gcc=build-essential jq=jq ip=iproute2 iptables-nft-restore=iptables nft=nftables openssl=openssl \
    /usr/lib/cni/bridge=containernetworking-plugins
need_rust
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
work=$(mktemp -d)

say "building (the first time: several minutes)"
build_static release --bin detour
build_static release --example probe --example measure
built="$(target_directory)/$target/release"
detour="$built/detour" probe="$built/examples/probe" measure="$built/examples/measure"
write_files
start_api
start_agent
record_rules

say "measuring: $rounds rounds of $contenders contenders"
for ((round = 0; round < rounds; round++)); do
    for ((turn = 0; turn < contenders; turn++)); do
        make_pod_netns
        # Rotate the order from round to round.
        contend $(((round + turn) % contenders))
        ip netns delete "$netns"
    done
done
"$measure" table "$work/costs"
echo
echo "rules applied: $(grep -hc '^-A' "$work/rules.v4" "$work/rules.v6" | paste -sd+ | sed 's/+/ (IPv4) + /; s/$/ (IPv6)/')"
echo "binary: $(stat -c %s "$detour") bytes ($target)"
