#!/usr/bin/env bash
# Shows on one Linux machine, without a cluster, what detour changes for a pod on OpenShift: an init container with
# UID 1337 needs the network before the sidecar runs. The script builds the static binary, makes a pod out of network
# namespaces, calls the binary as Multus does, first without and then with exclusions, and sends real traffic as each of
# the pod's users. It exits with 1 if a connection ended up elsewhere than expected, and removes everything that it made.
#
#   -v              list all connections, not only those of the table
#   --keep          leave the pod, for your own experiments with detour explain, trace and rules
#   --remove        remove the pod that --keep left
#   --binaries DIR  use DIR/detour and DIR/examples/probe instead of a build
#
# Usage: hack/demo.sh [-v] [--keep] [--binaries DIR]
#        hack/demo.sh --remove
set -euo pipefail
script=$(realpath "$0")
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh

verbose=false keep=false remove=false binaries='' given=("$@")
while [[ $# -gt 0 ]]; do
    case $1 in
        -v) verbose=true ;;
        --keep) keep=true ;;
        --remove) remove=true ;;
        --binaries)
            binaries=$(realpath "${2:-}" 2>/dev/null) || die "--binaries: expected a directory, got \"${2:-}\""
            for program in detour examples/probe; do
                [[ -x $binaries/$program ]] || die "--binaries: $binaries/$program: not found, or not executable"
            done
            shift
            ;;
        --rules) die "--rules no longer exists; use --keep, and detour rules or iptables in the network namespace" ;;
        *) die "unknown argument \"$1\"; expected -v, --keep, --remove or --binaries DIR; see hack/demo.sh --help" ;;
    esac
    shift
done

app_uid=1000650000 proxy_uid=1000659999 vault_uid=1337
pod_v4=10.88.0.2 pod_v6=fd88::2
outside_v4=10.88.0.1 outside_v6=fd88::1
resolver_v4=10.96.0.10 resolver_v6=fd96::a
server_v4=198.51.100.20 server_v6=2001:db8:20::1
pod_uid=8e5bd6a4-9a35-4f0e-9d2b-1c33a5b0a001

# The scene: two network namespaces, the files of the pod, and the servers. Without --keep, they are in a mount namespace
# that ends with this script.
pod=detour-demo-pod outside=detour-demo-outside scene=/run/detour-demo

remove_scene() {
    local netns
    if [[ -e $scene/attached ]]; then
        delete_pod || true
    fi
    for netns in "$pod" "$outside"; do
        if [[ -e /run/netns/$netns ]]; then
            end_processes "$netns"
            ip netns delete "$netns" || true
        fi
    done
    if [[ -e $scene/no-state ]]; then
        # The plugin made its directory, in which only empty directories are left.
        find /run/detour -depth -type d -empty -delete 2>/dev/null || true
    fi
    rm -rf "$scene"
}

end_processes() {
    local processes
    mapfile -t processes < <(ip netns pids "$1")
    if [[ ${#processes[@]} -gt 0 ]]; then
        kill "${processes[@]}" 2>/dev/null || true
        local waits=0
        while [[ -n $(ip netns pids "$1") && $((waits += 1)) -lt 100 ]]; do
            sleep 0.05
        done
    fi
}

clean_up() {
    local status=$?
    trap - EXIT
    trap '' INT TERM
    if [[ -n $builds ]]; then
        kill "$builds" 2>/dev/null || true
    fi
    rm -f "$log"
    if ! "$kept"; then
        remove_scene
    fi
    exit "$status"
}

# show_progress LOG: prints the time and cargo's current step until it is ended: on a terminal each second on one line,
# otherwise one line each 15 seconds.
show_progress() {
    local start=$SECONDS elapsed step every=15 before='' after='\n'
    if [[ -t 1 ]]; then
        every=1 before='\r\e[K' after=''
    fi
    # A sleep that outlives the loop must not keep a pipe open.
    while sleep "$every" &>/dev/null; do
        elapsed=$((SECONDS - start))
        step=$(tail -n 1 "$1" | sed 's/^ *//')
        printf "$before    %d:%02d  %s (crate %d)$after" $((elapsed / 60)) $((elapsed % 60)) "${step:0:60}" \
            "$(grep -c '^ *Compiling' "$1")"
    done
}

# Builds the binary and the traffic tool.
build() {
    local start=$SECONDS failed=false
    log=$(mktemp)
    show_progress "$log" &
    builds=$!
    build_static demo --bin detour --example probe &>"$log" || failed=true
    kill "$builds"
    wait "$builds" 2>/dev/null || true
    builds=''
    [[ ! -t 1 ]] || printf '\r\e[K'
    if "$failed"; then
        cat "$log" >&2
        die "cargo build failed"
    fi
    echo "    built in $((SECONDS - start)) s"
    binaries="$(target_directory)/$target/demo"
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
    mkdir "$scene/manifests"
    cat >"$scene/manifests/namespace.yaml" <<END
apiVersion: v1
kind: Namespace
metadata:
  name: shop
  annotations:
    openshift.io/sa.scc.uid-range: 1000650000/10000
    openshift.io/sa.scc.supplemental-groups: 1000650000/10000
END
    cat >"$scene/manifests/pod.yaml" <<END
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
    cat >"$scene/manifests/net-attach-def.yaml" <<END
apiVersion: k8s.cni.cncf.io/v1
kind: NetworkAttachmentDefinition
metadata:
  name: istio-cni
  namespace: default
END
}

# write_configuration FILE CHAIN: the plugin's configuration, which Multus finds by its name in /etc/cni/multus/net.d.
write_configuration() {
    cat >"$scene/$1" <<END
{
  "cniVersion": "0.3.1",
  "name": "istio-cni",
  "type": "detour",
  "log_level": "warn",
  "kubernetes": { "manifests_dir": "$scene/manifests" },
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
        "$scene/detour" <"$scene/$2"
}

start_pod() {
    echo "$1" >"$scene/attached"
    call_plugin ADD "$1" >/dev/null
}

delete_pod() {
    call_plugin DEL "$(<"$scene/attached")" >/dev/null
    rm "$scene/attached"
}

# serve NETNS LABEL UID ENDPOINT…: starts servers. They end when their stdin ends: with this script, which holds the
# other end of the pipe, also after a signal. Those of a kept scene hold both ends.
serve() {
    local netns=$1 label=$2 uid=$3 ready=''
    shift 3
    rm -f "$scene/$label.ready"
    mkfifo "$scene/$label.ready"
    if "$keep"; then
        exec 4<>"$scene/alive"
    else
        exec 4<"$scene/alive"
    fi
    setsid ip netns exec "$netns" "$probe" serve --label "$label" --uid "$uid" --gid "$uid" "$@" \
        <&4 >"$scene/$label.ready" 2>"$scene/$label.log" 3>&- 4<&- &
    disown
    exec 4<&-
    read -r -t 60 ready <"$scene/$label.ready" || true
    [[ $ready == ready ]] || die "servers in network namespace $netns: not ready within 60 s: $(<"$scene/$label.log")"
}

start_outside() {
    mkfifo "$scene/alive"
    exec 3<>"$scene/alive"
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

# The connections in the order in which they were made, as rows for -v, and where those of the table ended up.
sent=0 wrong=0
declare -A ended=()

# row NETNS SENDER UID LABEL PROTOCOL TO EXPECTED: sends one message. Prints a row with -v, and if it is wrong.
row() {
    local netns=$1 sender=$2 uid=$3 label=$4 protocol=$5 to=$6 expected=$7 timeout=60000 answer seen verdict
    # A message that is lost would only delay the demo.
    [[ $expected != lost ]] || timeout=1000
    answer=$(ip netns exec "$netns" "$probe" send --timeout-ms "$timeout" --uid "$uid" --gid "$uid" "$protocol:$to" 3>&-) ||
        true
    seen=$(destination "$answer" "$to")
    sent=$((sent + 1))
    ended["$phase $sender $label $to"]=$seen
    if [[ $seen == "$expected" || $seen == "$expected ("* ]]; then
        verdict="${green}ok${plain}"
        "$verbose" || return 0
    else
        verdict="${red}WRONG: expected $expected${plain}"
        wrong=$((wrong + 1))
    fi
    printf '    %-14s  UID %-10s  %-7s  %-23s  %-15s %s\n' "$sender" "$uid" "$label" "$to" "$seen" "$verdict"
}

# rows_of SENDER UID TCP DNS: one sender's traffic in both families, with the expectations for TCP and for DNS.
rows_of() {
    local sender=$1 uid=$2 tcp=$3 dns=$4 server resolver
    for server in "$server_v4" "[$server_v6]"; do
        row "$pod" "$sender" "$uid" TCP tcp "$server:443" "$tcp"
    done
    for resolver in "$resolver_v4" "[$resolver_v6]"; do
        row "$pod" "$sender" "$uid" DNS udp "$resolver:53" "$dns"
        row "$pod" "$sender" "$uid" 'TCP DNS' tcp "$resolver:53" "$dns"
    done
}

send_to_pod() {
    local address
    for address in "$pod_v4" "[$pod_v6]"; do
        row "$outside" outside 0 TCP tcp "$address:8080" sidecar:15006
        row "$outside" outside 0 TCP tcp "$address:15020" direct
    done
}

# The connections that matter, with and without exclusions.
print_table() {
    local sender label to format='%-15s %-22s %-20s %s\n'
    # shellcheck disable=SC2059 # the format is the constant above
    printf "\n$bold$format$plain" '' '' 'without exclusions' 'UID 1337 excluded'
    for sender in 'init container' application; do
        for label in TCP DNS; do
            to=$server_v4:443
            [[ $label == TCP ]] || to=$resolver_v4:53
            # shellcheck disable=SC2059
            printf "$format" "$sender" "$label $to" "${ended["before $sender $label $to"]}" "${ended["after $sender $label $to"]}"
        done
    done
}

print_summary() {
    echo
    say "summary"
    echo "The init container runs before the sidecar. Without exclusions, it reaches neither server nor DNS."
    echo "With UID 1337 excluded, it reaches both directly (direct), as it would without a mesh."
    echo "The application's traffic and DNS go to the sidecar (sidecar:PORT) in both cases."
    if [[ $wrong -eq 0 ]]; then
        echo "All $sent connections, IPv4 and IPv6, ended up where expected; hack/demo.sh -v lists them."
    else
        echo "${red}$wrong of $sent connections ended up elsewhere than expected.${plain}"
    fi
    echo
    echo "Binary: $binaries/detour"
    if ! "$keep"; then
        echo "Next:   hack/demo.sh --keep   # leave this pod, and try explain, trace and rules on it"
        return
    fi
    cat <<END
Kept:   network namespaces $pod and $outside, files in $scene
Next:
  cd $scene
  ./detour explain -f manifests/pod.yaml --namespace-file manifests/namespace.yaml --config exclude.conf
  ./detour trace --netns $pod --from uid=$vault_uid --to $resolver_v4:53/udp
  ./detour rules $pod
Remove: $script --remove
END
}

need_root
need_commands ip=iproute2 unshare=util-linux
if "$remove"; then
    [[ -e $scene ]] || die "nothing to remove: $scene not found"
    remove_scene
    echo "removed: network namespaces $pod and $outside, $scene"
    exit
fi
if "$keep"; then
    [[ ! -e $scene ]] || die "$scene exists; remove it first: hack/demo.sh --remove"
else
    in_own_mounts "${given[@]}"
fi
builds='' log='' kept=true
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if [[ -z $binaries ]]; then
    need_commands gcc=build-essential
    need_rust
    say "1/3 build the static binary and a traffic tool (the first time about three minutes on two cores)"
    build
else
    say "1/3 use the binaries in $binaries"
fi
probe="$binaries/examples/probe"

say "2/3 start a pod without exclusions: its init container sends before the sidecar runs, its application after"
# Not before the build: /etc/resolv.conf can refer to /run.
"$keep" || hide /run
kept=false
mkdir -m 0755 "$scene"
[[ -e /run/detour ]] || touch "$scene/no-state"
ln -s "$binaries/detour" "$scene/detour"
make_network
write_objects
write_configuration redirect.conf '    { "type": "istio-redirect" }'
write_configuration exclude.conf '    { "type": "istio-redirect" },
    { "type": "uid-exclude", "uids": ["1337"] },
    { "type": "dns-exclude", "uids": ["1337"] }'
start_outside
phase=before
start_pod redirect.conf
rows_of 'init container' "$vault_uid" lost lost
start_sidecar
rows_of application "$app_uid" sidecar:15001 sidecar:15053
end_processes "$pod"
delete_pod

say '3/3 the same with two more entries in the chain: uid-exclude and dns-exclude with "uids": ["1337"]'
phase=after
start_pod exclude.conf
rows_of 'init container' "$vault_uid" direct direct
start_sidecar
rows_of application "$app_uid" sidecar:15001 sidecar:15053
rows_of sidecar "$proxy_uid" direct direct
rows_of process "$vault_uid" direct direct
send_to_pod

print_table
print_summary
kept=$keep
[[ $wrong -eq 0 ]]
