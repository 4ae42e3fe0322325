#!/usr/bin/env bash
# Measures what agents cost a real kube-apiserver with etcd, many namespaces and pods. Each agent has its own node, mount
# namespace and state. Prints the requests, watches, connections, bytes on the wire and CPU time of the API server for
# the start of the agents, a quiet period and changes of namespaces.
#
# Usage: hack/scale.sh [--agents N] [--namespaces N] [--pods N] [--seconds N]
#   --agents N       agents and nodes (default 50)
#   --namespaces N   namespaces with annotations as on OpenShift (default 1000)
#   --pods N         pods with a sidecar, on all nodes and in all namespaces (default 5000)
#   --seconds N      length of the quiet periods (default 120)
#   DETOUR_PROGRAM   the binary of the agents; default: build it
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh

agents=50 namespaces=1000 pods=5000 seconds=120
while [[ $# -gt 0 ]]; do
    [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || die "$1: invalid value \"${2:-}\"; expected a number"
    case $1 in
        --agents | --namespaces | --pods | --seconds) declare "${1#--}=$2" ;;
        *) die "unknown option $1" ;;
    esac
    shift 2
done
need_root
need_commands curl=curl openssl=openssl ss=iproute2 etcd=etcd-server awk=mawk unshare=util-linux
need_apiserver
program=${DETOUR_PROGRAM:-}
if [[ -z $program ]]; then
    need_rust
    build_static release --bin detour
    program=$(target_directory)/$target/release/detour
fi
program=$(realpath "$program")

work=$(mktemp -d)
processes=()
clean_up() {
    [[ ${#processes[@]} -eq 0 ]] || kill -KILL "${processes[@]}" 2>/dev/null || true
    wait 2>/dev/null || true
    rm -rf "$work"
}
trap clean_up EXIT
port=7443 etcd=http://127.0.0.1:7379 server=https://127.0.0.1:7443

say "starting etcd and kube-apiserver"
etcd --data-dir "$work/etcd" --listen-client-urls $etcd --advertise-client-urls $etcd --unsafe-no-fsync \
    --listen-peer-urls http://127.0.0.1:7380 --initial-advertise-peer-urls http://127.0.0.1:7380 \
    --initial-cluster default=http://127.0.0.1:7380 >"$work/etcd.log" 2>&1 &
processes+=($!)
openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=authority -keyout "$work/ca.key" -out "$work/ca.crt" 2>/dev/null
openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=server -CA "$work/ca.crt" -CAkey "$work/ca.key" -keyout "$work/server.key" \
    -addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=CA:FALSE -out "$work/server.crt" 2>/dev/null
openssl genrsa -out "$work/tokens.pem" 2048 2>/dev/null
# The agents are subject to authorization and to priority and fairness; the loader is not.
printf 'loader,loader,1,system:masters\nagent,agent,2,agents\n' >"$work/tokens"
"$(tools_directory)/kube-apiserver" --etcd-servers=$etcd --secure-port=$port --bind-address=127.0.0.1 \
    --advertise-address=127.0.0.1 --endpoint-reconciler-type=none --authorization-mode=RBAC \
    --tls-cert-file="$work/server.crt" --tls-private-key-file="$work/server.key" --token-auth-file="$work/tokens" \
    --service-account-key-file="$work/tokens.pem" --service-account-signing-key-file="$work/tokens.pem" \
    --service-account-issuer=https://kubernetes.default.svc --service-cluster-ip-range=10.96.0.0/24 \
    --disable-admission-plugins=ServiceAccount >"$work/kube-apiserver.log" 2>&1 &
processes+=($!)
loader=(--silent --show-error --fail-with-body --cacert "$work/ca.crt" -H 'Authorization: Bearer loader')
until curl "${loader[@]}" "$server/readyz" >/dev/null 2>&1 || [[ $SECONDS -gt 60 ]]; do sleep 1; done

# send METHOD NAME COUNT: sends the objects $work/NAME.0, … that `path` and `object` describe, 16 at once.
send() {
    local method=$1 name=$2 count=$3 i type=application/json
    [[ $method == POST ]] || type=application/merge-patch+json
    for ((i = 0; i < count; i++)); do
        "object_$name" "$i" >"$work/$name.$i"
        printf 'url = "%s%s"\nrequest = %s\nheader = "Authorization: Bearer loader"\nheader = "Content-Type: %s"\n' \
            "$server" "$("path_$name" "$i")" "$method" "$type"
        printf 'cacert = %s/ca.crt\ndata-binary = @%s\noutput = /dev/null\nfail\nnext\n' "$work" "$work/$name.$i"
    done | sed '$d' >"$work/$name.curl"
    curl --no-progress-meter --parallel --parallel-max 16 --config "$work/$name.curl"
}
# shellcheck disable=SC2317,SC2329
{
    path_namespace() { echo /api/v1/namespaces; }
    object_namespace() { echo '{"metadata": {"name": "scale-'"$1"'", "labels": {"istio-injection": "enabled", "team": "t-'"$1"'"}, "annotations": {"openshift.io/sa.scc.uid-range": "1000650000/10000", "openshift.io/sa.scc.mcs": "s0:c26,c0", "openshift.io/sa.scc.supplemental-groups": "1000650000/10000"}}}'; }
    path_change() { echo "/api/v1/namespaces/scale-$1"; }
    object_change() { echo '{"metadata": {"annotations": {"scale/changed": "'$RANDOM'"}}}'; }
    variables=$(for i in {1..20}; do printf '{"name": "VARIABLE_%s", "value": "value-%s-of-an-ordinary-length"},' "$i" "$i"; done)
    path_pod() { echo "/api/v1/namespaces/scale-$(($1 % namespaces))/pods"; }
    # Two containers with twenty variables each, as of an ordinary mesh.
    object_pod() { echo '{"metadata": {"name": "pod-'"$1"'", "labels": {"app": "web"}, "annotations": {"sidecar.istio.io/status": "{}"}}, "spec": {"nodeName": "node-'$(($1 % agents))'", "containers": [{"name": "web", "image": "web", "env": ['"${variables%,}"']}, {"name": "istio-proxy", "image": "proxy", "args": ["proxy", "sidecar"], "env": ['"${variables%,}"']}]}}'; }
}
say "creating $namespaces namespaces and $pods pods"
create() { curl "${loader[@]}" -o /dev/null -H 'Content-Type: application/json' --data-binary "$2" "$server$1"; }
create /apis/rbac.authorization.k8s.io/v1/clusterrolebindings '{"metadata": {"name": "agents"}, "roleRef": {"apiGroup":
    "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}, "subjects": [{"kind": "Group", "name": "agents"}]}'
create /api/v1/namespaces/kube-system/serviceaccounts '{"metadata": {"name": "plugin"}}'
create /apis/apps/v1/namespaces/kube-system/daemonsets '{"metadata": {"name": "agent"}, "spec": {"selector": {"matchLabels":
    {"a": "b"}}, "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}}}}'
for ((i = 0; i < agents; i++)); do
    create /api/v1/nodes '{"metadata": {"name": "node-'$i'"}}'
done
send POST namespace "$namespaces"
send POST pod "$pods"

# Prints the sum of a metric's series that match a pattern.
metric() { awk -v name="$1" -v pattern="${2:-.}" '$1 ~ "^" name "([{]|$)" && $0 ~ pattern {sum += $NF} END {printf "%.2f", sum}' "$work/metrics"; }
# The resources that agents use.
resources='resource="(pods|namespaces|serviceaccounts|events|nodes|daemonsets)"' before=
# Prints what has changed since the last call.
report() {
    local now
    curl "${loader[@]}" "$server/metrics" >"$work/metrics"
    now="$(metric apiserver_request_total "$resources") $(metric apiserver_longrunning_requests 'verb="WATCH"')"
    now+=$(ss -Htin state established "( dport = :$port )" |
        awk -F: 'BEGIN {RS = "[ \n]"} /^bytes_received:/ {open++; sum += $2} END {printf " %d %d ", open, sum}')
    now+="$(metric process_cpu_seconds_total) $(metric process_resident_memory_bytes) $SECONDS"
    [[ -z $before ]] || awk -v what="$1" -v a="$before" -v b="$now" 'BEGIN {
        split(a, x); split(b, y)
        printf "%-26s %7d %8d %7d %11d %11.2f %6.2f %6.0f\n", what, y[7] - x[7], y[1] - x[1], y[2] - x[2], y[3] - x[3],
            (y[4] - x[4]) / 1e6, y[5] - x[5], y[6] / 1e6 }'
    before=$now
}
printf '%-26s %7s %8s %7s %11s %11s %6s %6s\n' phase seconds requests watches connections 'MB received' 'CPU s' 'RSS MB'
report
sleep "$seconds"
report "no agent"
mkdir "$work/account"
cp "$work/ca.crt" "$work/account/ca.crt" && printf agent >"$work/account/token"
for ((i = 0; i < agents; i++)); do
    root=$work/node-$i
    mkdir -p "$root"/{run,var/lib/cni,opt/cni/bin,etc/cni/net.d}
    echo '{"cniVersion": "1.0.0", "name": "cluster", "plugins": [{"type": "bridge"}]}' >"$root/etc/cni/net.d/10-cluster.conflist"
    unshare --mount sh -c "mkdir -p /var/lib/cni && mount --bind '$root/run' /run && mount --bind '$root/var/lib/cni' /var/lib/cni &&
        POD_NAMESPACE=kube-system exec '$program' agent --platform=kubernetes --root='$root' --node-name=node-$i --primary=false \
        --plugin-service-account=plugin --daemon-set=agent --on-exit=auto --api-server=$server --service-account='$work/account'" \
        >"$work/agent.$i.log" 2>&1 &
    processes+=($!)
done
for ((i = 0; i < agents; i++)); do
    until [[ $(grep -cE "watching (namespaces|pods)" "$work/agent.$i.log") -ge 2 ]]; do
        kill -0 "${processes[i + 2]}" || die "agent $i has ended: $(tail -n 3 "$work/agent.$i.log")"
        sleep 1
    done
done
sleep 10
report "start of $agents agents"
sleep "$seconds"
report "quiet"
changes=$((namespaces < 100 ? namespaces : 100)) && send PATCH change "$changes"
sleep 10
report "$changes namespaces change"
grep -q 'resource="serviceaccounts".*subresource="token".*verb="POST"' <<<"$(grep 'code="201"' "$work/metrics")" ||
    die "no agent has got a token for the plugin; expected one for each"
say "all requests for these resources, with those of this script"
awk -v pattern="$resources" '/^apiserver_request_total/ && $0 ~ pattern' "$work/metrics" |
    sed -E 's/.*code="([0-9]*)".*resource="([a-z]*)".*subresource="([a-z]*)".*verb="([A-Z]*)".* ([0-9]*)$/\4 \2 \3 \1: \5/'
