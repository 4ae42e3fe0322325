#!/usr/bin/env bash
# The whole story on one machine, without a cluster: a pod whose Vault init container is stuck at
# UID 1337, on an OpenShift that gave the proxy another one. Builds the static binary, calls it as
# Multus would for default/istio-cni, sends real traffic, and prints where it arrived.
# Exits 1 when anything arrived elsewhere than it should. Cleans up after itself.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh

app_uid=1000650000 proxy_uid=1000659999 vault_uid=1337
pod_v4=10.88.0.2 pod_v6=fd88::2
outside_v4=10.88.0.1 outside_v6=fd88::1
resolver_v4=10.96.0.10 resolver_v6=fd96::a
server_v4=198.51.100.20 server_v6=2001:db8:20::1

pod="detour-demo-$$-pod" outside="detour-demo-$$-outside"
work=''
servers=()
attached=false

clean_up() {
    local status=$?
    trap - EXIT
    trap '' INT TERM
    if "$attached"; then
        call_plugin DEL >/dev/null || true
    fi
    if [[ ${#servers[@]} -gt 0 ]]; then
        kill "${servers[@]}" 2>/dev/null || true
        wait "${servers[@]}" 2>/dev/null || true
    fi
    local netns
    for netns in "$pod" "$outside"; do
        if [[ -e /run/netns/$netns ]]; then
            ip netns delete "$netns" || true
        fi
    done
    if [[ -n $work ]]; then
        rm -rf "$work"
    fi
    exit "$status"
}

make_world() {
    ip netns add "$pod"
    ip netns add "$outside"
    ip link add name eth0 netns "$pod" type veth peer name eth0 netns "$outside"
    ip -n "$outside" -batch - <<EOF
link set lo up
link set eth0 up
addr add $outside_v4/24 dev eth0
addr add $outside_v6/64 dev eth0 nodad
addr add $resolver_v4/32 dev lo
addr add $resolver_v6/128 dev lo nodad
addr add $server_v4/32 dev lo
addr add $server_v6/128 dev lo nodad
EOF
    ip -n "$pod" -batch - <<EOF
link set lo up
link set eth0 up
addr add $pod_v4/24 dev eth0
addr add $pod_v6/64 dev eth0 nodad
route add default via $outside_v4
route add default via $outside_v6
EOF
}

# What the API server and the node hold: the pod as Istio's injector leaves it, its namespace with
# the UID range, the empty definition that the annotation names, and the file which that finds.
write_cluster() {
    mkdir "$work/manifests" "$work/net.d"
    cat >"$work/manifests/namespace.yaml" <<EOF
apiVersion: v1
kind: Namespace
metadata:
  name: shop
  annotations:
    openshift.io/sa.scc.uid-range: 1000650000/10000
    openshift.io/sa.scc.supplemental-groups: 1000650000/10000
EOF
    cat >"$work/manifests/pod.yaml" <<EOF
apiVersion: v1
kind: Pod
metadata:
  name: web-0
  namespace: shop
  uid: $pod_uid
  annotations:
    k8s.v1.cni.cncf.io/networks: default/istio-cni
    sidecar.istio.io/status: '{"revision":"default"}'
spec:
  nodeName: node-1
  initContainers:
  - name: vault-agent-init
    image: vault
    securityContext: { runAsUser: $vault_uid }
  containers:
  - name: web
    image: web
    securityContext: { runAsUser: $app_uid }
  - name: istio-proxy
    image: proxyv2
    args: [proxy, sidecar]
    env:
    - { name: ISTIO_META_DNS_CAPTURE, value: "true" }
    securityContext: { runAsUser: $proxy_uid, runAsGroup: $proxy_uid }
EOF
    cat >"$work/manifests/net-attach-def.yaml" <<EOF
apiVersion: k8s.cni.cncf.io/v1
kind: NetworkAttachmentDefinition
metadata:
  name: istio-cni
  namespace: default
EOF
    cat >"$work/net.d/istio-cni.conf" <<EOF
{
  "cniVersion": "0.3.1",
  "name": "istio-cni",
  "type": "detour",
  "kubernetes": {
    "manifests_dir": "$work/manifests",
    "exclude_namespaces": ["istio-system", "kube-system"]
  },
  "chain": [
    { "type": "istio-redirect" },
    { "type": "uid-exclude", "uids": ["1337"] },
    { "type": "dns-exclude", "uids": ["1337"] }
  ]
}
EOF
}

pod_uid=8e5bd6a4-9a35-4f0e-9d2b-1c33a5b0a001

# Multus gives a delegate net1 as its interface, no prevResult, and every argument twice.
call_plugin() {
    local pod_arguments="K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_INFRA_CONTAINER_ID=$pod;K8S_POD_UID=$pod_uid"
    env -i PATH= \
        CNI_COMMAND="$1" CNI_CONTAINERID="$pod" CNI_NETNS="/var/run/netns/$pod" CNI_IFNAME=net1 \
        CNI_PATH=/var/lib/cni/bin:/opt/cni/bin \
        CNI_ARGS="IgnoreUnknown=true;$pod_arguments;IgnoreUnknown=1;$pod_arguments" \
        "$detour" <"$work/net.d/istio-cni.conf"
}

# serve NETNS LABEL UID ENDPOINT…: answers there until this script ends, however it ends: the
# servers live as long as somebody holds the other end of their stdin.
serve() {
    local netns=$1 label=$2 uid=$3 ready=''
    shift 3
    mkfifo "$work/$label.ready"
    ip netns exec "$netns" "$probe" serve --label "$label" --uid "$uid" --gid "$uid" "$@" \
        <"$work/alive" >"$work/$label.ready" 3>&- &
    servers+=($!)
    read -r -t 10 ready <"$work/$label.ready" || true
    [[ $ready == ready ]] || die "the servers of $label can't listen"
}

serve_everything() {
    mkfifo "$work/alive"
    exec 3<>"$work/alive"
    # Whoever takes what is redirected is the proxy: its answers must bear its UID.
    local port in_pod=() in_outside=()
    for port in 15001 15006 15020 8080; do
        in_pod+=("tcp:0.0.0.0:$port" "tcp:[::]:$port")
    done
    serve "$pod" pod "$proxy_uid" "${in_pod[@]}" \
        tcp:127.0.0.1:15053 'tcp:[::1]:15053' udp:127.0.0.1:15053 'udp:[::1]:15053'
    for port in 53 443; do
        in_outside+=("tcp:0.0.0.0:$port" "tcp:[::]:$port")
    done
    serve "$outside" outside 0 "${in_outside[@]}" "udp:$resolver_v4:53" "udp:[$resolver_v6]:53"
}

# arrived ANSWER TO: in words.
arrived() {
    local answer=$1 to=$2 label at original
    if [[ $answer =~ \"error\":\"([a-z]+)\" ]]; then
        echo "nowhere (${BASH_REMATCH[1]})"
        return
    fi
    label=$(field label "$answer") at=$(field local "$answer") original=$(field original_destination "$answer")
    if [[ $at == "$to" ]]; then
        echo direct
    elif [[ $label == pod && ( -z $original || $original == "$to" ) ]]; then
        echo "sidecar:${at##*:}"
    else
        echo "$label $at, meant for ${original:-?}"
    fi
}

field() {
    if [[ $2 =~ \"$1\":\"([^\"]+)\" ]]; then
        echo "${BASH_REMATCH[1]}"
    fi
}

table='%-12s %-11s %-8s %-24s %-14s %-14s %s\n'
wrong=0

# row NETNS WHO UID WHAT PROTOCOL TO EXPECTED
row() {
    local netns=$1 who=$2 uid=$3 what=$4 protocol=$5 to=$6 expected=$7 answer seen verdict
    answer=$(ip netns exec "$netns" "$probe" send --uid "$uid" --gid "$uid" "$protocol:$to" 3>&-) || true
    seen=$(arrived "$answer" "$to")
    if [[ $seen == "$expected" ]]; then
        verdict="${green}ok${plain}"
    else
        verdict="${red}WRONG${plain}"
        wrong=$((wrong + 1))
    fi
    # shellcheck disable=SC2059 # the format is the constant above
    printf "$table" "$who" "$uid" "$what" "$to" "$seen" "$expected" "$verdict"
}

# What one process sends, in both families: expectations for TCP and for DNS.
rows_of() {
    local who=$1 uid=$2 tcp=$3 dns=$4 server resolver
    for server in "$server_v4" "[$server_v6]"; do
        row "$pod" "$who" "$uid" TCP tcp "$server:443" "$tcp"
    done
    for resolver in "$resolver_v4" "[$resolver_v6]"; do
        row "$pod" "$who" "$uid" "UDP DNS" udp "$resolver:53" "$dns"
        row "$pod" "$who" "$uid" "TCP DNS" tcp "$resolver:53" "$dns"
    done
}

send_everything() {
    # shellcheck disable=SC2059 # the format is the constant above
    printf "$bold$table$plain" 'who' 'UID' 'sends' 'to' 'arrived' 'expected' ''
    rows_of app "$app_uid" sidecar:15001 sidecar:15053
    rows_of istio-proxy "$proxy_uid" direct direct
    rows_of vault-init "$vault_uid" direct direct
    local address
    for address in "$pod_v4" "[$pod_v6]"; do
        row "$outside" outside 0 TCP tcp "$address:8080" sidecar:15006
        row "$outside" outside 0 TCP tcp "$address:15020" direct
    done
}

show_rules() {
    local tool
    for tool in iptables ip6tables; do
        say "$tool -t nat -L -n -v"
        ip netns exec "$pod" "$tool" -t nat -L -n -v
        say "$tool-save"
        ip netns exec "$pod" "$tool-save"
    done
}

need_root
need_commands gcc=build-essential ip=iproute2 iptables=iptables
need_rust
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
work=$(mktemp -d)

say "building the static binary and the traffic tool (minutes, the first time)"
build_static --bin detour
build_static --example probe
built="$(target_directory)/$target/release"
detour="$built/detour" probe="$built/examples/probe"

say "making a pod and a world around it"
make_world
write_cluster
serve_everything
cat "$work/net.d/istio-cni.conf"

say "calling detour as Multus does for default/istio-cni"
attached=true
call_plugin ADD

say "sending real traffic"
send_everything
show_rules
if [[ $wrong -gt 0 ]]; then
    die "$wrong of the rows above are WRONG"
fi
say "everything arrived where it should"
