#!/usr/bin/env bash
# Shows on one Linux machine, without a cluster, what detour changes for a pod on OpenShift: an init container
# with UID 1337 resolves a name before the sidecar runs. The script builds the static binary, makes a pod out of
# network namespaces, calls the binary as Multus does, sends real traffic as each of the pod's users, and prints
# where each connection ended up. It exits with 1 if a connection ended up elsewhere than expected, and removes
# everything that it made.
#
# Usage: hack/demo.sh [--rules]
#   --rules  also list the pod's rules with iptables
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh

case "${1:-}" in
    '') list_rules=false ;;
    --rules) list_rules=true ;;
    *) die "unknown argument \"$1\"; expected --rules" ;;
esac

app_uid=1000650000 proxy_uid=1000659999 vault_uid=1337
pod_v4=10.88.0.2 pod_v6=fd88::2
outside_v4=10.88.0.1 outside_v6=fd88::1
resolver_v4=10.96.0.10 resolver_v6=fd96::a
server_v4=198.51.100.20 server_v6=2001:db8:20::1
pod_uid=8e5bd6a4-9a35-4f0e-9d2b-1c33a5b0a001

pod="detour-demo-$$-pod" outside="detour-demo-$$-outside"
work=''
servers=()
attached=''

clean_up() {
    local status=$?
    trap - EXIT
    trap '' INT TERM
    if [[ -n $attached ]]; then
        call_plugin DEL "$attached" >/dev/null || true
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

# Two network namespaces connected by a veth pair: the pod, and the rest of the world.
make_network() {
    ip netns add "$pod"
    ip netns add "$outside"
    ip link add name eth0 netns "$pod" type veth peer name eth0 netns "$outside"
    ip -n "$outside" -batch - <<END
link set lo up
link set eth0 up
addr add $outside_v4/24 dev eth0
addr add $outside_v6/64 dev eth0 nodad
addr add $resolver_v4/32 dev lo
addr add $resolver_v6/128 dev lo nodad
addr add $server_v4/32 dev lo
addr add $server_v6/128 dev lo nodad
END
    ip -n "$pod" -batch - <<END
link set lo up
link set eth0 up
addr add $pod_v4/24 dev eth0
addr add $pod_v6/64 dev eth0 nodad
route add default via $outside_v4
route add default via $outside_v6
END
}

# The objects that the plugin would get from the API server: the pod after Istio's injection, its namespace with
# OpenShift's UID range, and the empty definition to which the pod's annotation refers.
write_objects() {
    mkdir "$work/manifests"
    cat >"$work/manifests/namespace.yaml" <<END
apiVersion: v1
kind: Namespace
metadata:
  name: shop
  annotations:
    openshift.io/sa.scc.uid-range: 1000650000/10000
    openshift.io/sa.scc.supplemental-groups: 1000650000/10000
END
    cat >"$work/manifests/pod.yaml" <<END
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
END
    cat >"$work/manifests/net-attach-def.yaml" <<END
apiVersion: k8s.cni.cncf.io/v1
kind: NetworkAttachmentDefinition
metadata:
  name: istio-cni
  namespace: default
END
}

# write_configuration FILE CHAIN: the plugin's configuration, which Multus finds by its name in /etc/cni/multus/net.d.
write_configuration() {
    cat >"$work/$1" <<END
{
  "cniVersion": "0.3.1",
  "name": "istio-cni",
  "type": "detour",
  "log_level": "warn",
  "kubernetes": { "manifests_dir": "$work/manifests" },
  "chain": [
$2
  ]
}
END
}

# call_plugin COMMAND CONFIGURATION: Multus gives an attachment the interface name net1 and no prevResult, and
# passes each CNI argument twice.
call_plugin() {
    local arguments="K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_INFRA_CONTAINER_ID=$pod;K8S_POD_UID=$pod_uid"
    env -i PATH= \
        CNI_COMMAND="$1" CNI_CONTAINERID="$pod" CNI_NETNS="/var/run/netns/$pod" CNI_IFNAME=net1 \
        CNI_PATH=/var/lib/cni/bin:/opt/cni/bin \
        CNI_ARGS="IgnoreUnknown=true;$arguments;IgnoreUnknown=1;$arguments" \
        "$detour" <"$work/$2"
}

start_pod() {
    attached=$1
    call_plugin ADD "$1" >/dev/null
}

delete_pod() {
    call_plugin DEL "$attached" >/dev/null
    attached=''
}

# serve NETNS LABEL UID ENDPOINT…: starts servers. They end when the other end of their stdin is closed, which
# happens when this script ends, also by a signal.
serve() {
    local netns=$1 label=$2 uid=$3 ready=''
    shift 3
    mkfifo "$work/$label.ready"
    ip netns exec "$netns" "$probe" serve --label "$label" --uid "$uid" --gid "$uid" "$@" \
        <"$work/alive" >"$work/$label.ready" 3>&- &
    servers+=($!)
    read -r -t 10 ready <"$work/$label.ready" || true
    [[ $ready == ready ]] || die "servers in network namespace $netns: not ready within 10 s"
}

start_outside() {
    mkfifo "$work/alive"
    exec 3<>"$work/alive"
    local port endpoints=()
    for port in 53 443; do
        endpoints+=("tcp:0.0.0.0:$port" "tcp:[::]:$port")
    done
    serve "$outside" outside 0 "${endpoints[@]}" "udp:$resolver_v4:53" "udp:[$resolver_v6]:53"
}

# The sidecar's ports and the application's, all served with the sidecar's UID: the rules recognize its answers by
# that UID.
start_sidecar() {
    local port endpoints=()
    for port in 15001 15006 15020 8080; do
        endpoints+=("tcp:0.0.0.0:$port" "tcp:[::]:$port")
    done
    serve "$pod" pod "$proxy_uid" "${endpoints[@]}" \
        tcp:127.0.0.1:15053 'tcp:[::1]:15053' udp:127.0.0.1:15053 'udp:[::1]:15053'
}

# destination ANSWER TO: prints direct, sidecar:PORT or lost (CAUSE).
destination() {
    local answer=$1 to=$2 label at original
    if [[ $answer =~ \"error\":\"([a-z]+)\" ]]; then
        echo "lost (${BASH_REMATCH[1]})"
        return
    fi
    label=$(field label "$answer") at=$(field local "$answer") original=$(field original_destination "$answer")
    if [[ $at == "$to" ]]; then
        echo direct
    elif [[ $label == pod && ( -z $original || $original == "$to" ) ]]; then
        echo "sidecar:${at##*:}"
    else
        echo "$label $at, sent to ${original:-?}"
    fi
}

field() {
    if [[ $2 =~ \"$1\":\"([^\"]+)\" ]]; then
        echo "${BASH_REMATCH[1]}"
    fi
}

table='%-12s %-11s %-8s %-24s %-16s %-14s %s\n'
wrong=0

heading() {
    # shellcheck disable=SC2059 # the format is the constant above
    printf "$bold$table$plain" 'sender' 'UID' 'protocol' 'to' 'ended up at' 'expected' ''
}

# row NETNS SENDER UID LABEL PROTOCOL TO EXPECTED: sends one message and prints a row of the table.
row() {
    local netns=$1 sender=$2 uid=$3 label=$4 protocol=$5 to=$6 expected=$7 answer seen verdict
    # Servers answer at once: a message that is lost would only delay the demo.
    answer=$(ip netns exec "$netns" "$probe" send --timeout-ms 2000 --uid "$uid" --gid "$uid" "$protocol:$to" 3>&-) || true
    seen=$(destination "$answer" "$to")
    if [[ $seen == "$expected" || $seen == "$expected ("* ]]; then
        verdict="${green}ok${plain}"
    else
        verdict="${red}WRONG${plain}"
        wrong=$((wrong + 1))
    fi
    # shellcheck disable=SC2059 # the format is the constant above
    printf "$table" "$sender" "$uid" "$label" "$to" "$seen" "$expected" "$verdict"
}

# rows_of SENDER UID TCP DNS: one sender's traffic in both families, with the expectations for TCP and for DNS.
rows_of() {
    local sender=$1 uid=$2 tcp=$3 dns=$4 server resolver
    for server in "$server_v4" "[$server_v6]"; do
        row "$pod" "$sender" "$uid" TCP tcp "$server:443" "$tcp"
    done
    for resolver in "$resolver_v4" "[$resolver_v6]"; do
        row "$pod" "$sender" "$uid" "UDP DNS" udp "$resolver:53" "$dns"
        row "$pod" "$sender" "$uid" "TCP DNS" tcp "$resolver:53" "$dns"
    done
}

send_to_pod() {
    local address
    for address in "$pod_v4" "[$pod_v6]"; do
        row "$outside" outside 0 TCP tcp "$address:8080" sidecar:15006
        row "$outside" outside 0 TCP tcp "$address:15020" direct
    done
}

# run_detour ARGUMENT…: prints a detour command and runs it.
run_detour() {
    printf '%s$ detour %s%s\n' "$bold" "${*//$work\//}" "$plain"
    (cd "$work" && "$detour" "$@")
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
need_commands gcc=build-essential ip=iproute2 unshare=util-linux
if "$list_rules"; then
    need_commands iptables=iptables
fi
need_rust
in_own_mounts "$@"
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
work=$(mktemp -d)

say "1/6 Build the static binary and the traffic tool (the first time: two to three minutes on two cores)"
build_static demo --bin detour --example probe
built="$(target_directory)/$target/demo"
detour="$built/detour" probe="$built/examples/probe"

say "2/6 Make a pod with a sidecar, and a network around it"
# Not before the build: /etc/resolv.conf can refer to /run.
hide /run
make_network
write_objects
write_configuration redirect.conf '    { "type": "istio-redirect" }'
write_configuration exclude.conf '    { "type": "istio-redirect" },
    { "type": "uid-exclude", "uids": ["1337"] },
    { "type": "dns-exclude", "uids": ["1337"] }'
start_outside

say "3/6 Start the pod without exclusions: its init container runs before the sidecar and reaches nothing"
start_pod redirect.conf
heading
rows_of vault-init "$vault_uid" lost lost
delete_pod

say "4/6 Start the same pod with UID 1337 and its DNS excluded: the init container reaches everything"
sed -n '/"chain"/,/^  \]/p' "$work/exclude.conf"
start_pod exclude.conf
heading
rows_of vault-init "$vault_uid" direct direct
say "5/6 Start the sidecar: the application's traffic goes to it, excluded traffic bypasses it"
start_sidecar
heading
rows_of app "$app_uid" sidecar:15001 sidecar:15053
rows_of istio-proxy "$proxy_uid" direct direct
rows_of vault-init "$vault_uid" direct direct
send_to_pod

say "6/6 Ask detour why: explain reads the manifests, trace reads the rules in the kernel"
run_detour explain -f manifests/pod.yaml --namespace-file manifests/namespace.yaml --config exclude.conf
run_detour trace --netns "$pod" --from "uid=$vault_uid" --to "$resolver_v4:53/udp"

if "$list_rules"; then
    show_rules
else
    echo "hack/demo.sh --rules also lists the pod's rules with iptables."
fi
if [[ $wrong -gt 0 ]]; then
    die "$wrong connections ended up elsewhere than expected (rows marked WRONG)"
fi
say "done: every connection ended up where expected"
