#!/usr/bin/env bash
# A mesh of the real istiod, pilot-agent and Envoy, with Multus and the guard: mutual TLS, STRICT, istio-validation, DNS,
# probes; a running pod whose redirection is flushed.
# shellcheck source-path=SCRIPTDIR source=../story.sh
source "$(dirname "$0")/../story.sh"

# run POD CONTAINER COMMAND…
run() {
    local pod=$1 container=$2
    shift 2
    k exec --namespace shop "$pod" --container "$container" -- "$@" 2>/dev/null
}
# request POD CONTAINER HOST: an HTTP request; prints the status line and the last line. busybox's static wget crashes.
request() {
    run "$1" "$2" sh -c "(printf 'GET / HTTP/1.1\r\nHost: b.shop.svc.cluster.local:8080\r\nConnection: close\r\n\r\n'; sleep 1) |
        timeout 5 nc $3 8080" | tr -d '\r' | sed -n '1p;$p' | paste -sd ' '
}
# counter POD NAME: the sum of Envoy's counters with this name.
counter() {
    run "$1" istio-proxy pilot-agent request GET "stats?filter=$2" | awk -F ': ' '/: [0-9]+$/ { sum += $2 } END { print sum + 0 }'
}
# queries ADDRESS: DNS queries of this address that the server outside of the cluster received.
queries() {
    grep -cE "dns (udp|tcp) $1 " "$cluster/outside.log" || true
}

up "$RUNTIME" 1
install_multus 1.0.0
install_detour --set global.platform=openshift,guard.enabled=true
install_istio --set global.platform=openshift
k apply -f hack/cluster/pods/shop.yaml >/dev/null
k label namespace shop istio-injection=enabled >/dev/null
k create service clusterip b --namespace shop --tcp 8080:8080 >/dev/null
record_packets
for name in web native b; do
    sidecar=true
    [[ $name != web ]] || sidecar=false
    sed "s/NAME/$name/" hack/cluster/pods/injected.yaml |
        k annotate --local -f - -o json "sidecar.istio.io/nativeSidecar=$sidecar" | k apply -f - >/dev/null
done
ready 300 shop
k get pods --namespace shop -o wide
b=$(address_of shop b)
for name in web native; do
    address=$(address_of shop "$name")
    expect "$name: the injector's attachment" default/istio-cni \
        "$(k get pod --namespace shop "$name" -o jsonpath='{.metadata.annotations.k8s\.v1\.cni\.cncf\.io/networks}')"
    expect "$name: istio-validation" 0 "$(k get pod --namespace shop "$name" -o json |
        jq '.status.initContainerStatuses[] | select(.name == "istio-validation").state.terminated.exitCode')"
    expect "$name: the init container before the application" "uid 1337: tcp direct, dns direct" \
        "$(logs shop "$name" vault-agent-init)"
    before=$(counter "$name" 'cluster.PassthroughCluster.*upstream_cx_total')
    run "$name" app report >/dev/null
    after=$(counter "$name" 'cluster.PassthroughCluster.*upstream_cx_total')
    expect "$name: connections of the application to 198.51.100.20 through Envoy" 1 $((after - before))
    run "$name" excluded report >/dev/null
    expect "$name: those of the excluded container" 0 $(($(counter "$name" 'cluster.PassthroughCluster.*upstream_cx_total') - after))
    before=$(queries "$address")
    expect "$name: DNS answer for the application" "*10.96.*" \
        "$(run "$name" app nslookup -type=a b.shop.svc.cluster.local 10.96.0.10 | sed -n 's/^Address: *//p' | tail -1)"
    expect "$name: its queries that left the pod" 0 $(($(queries "$address") - before))
    run "$name" excluded nslookup -type=a b.shop.svc.cluster.local 10.96.0.10 >/dev/null
    expect "$name: queries of the excluded container that left the pod" 1 $(($(queries "$address") - before))
    expect_within 60 "$name: request to b" "HTTP/1.1 200 OK hello from b" request "$name" app b.shop.svc.cluster.local
done
expect "b: TLS handshakes of its sidecar" '[1-9]*' "$(counter b 'listener.*15006.ssl.handshake')"
packets "$(address_of shop web)"
expect_within 60 "PERMISSIVE: plain request of the excluded container" "HTTP/1.1 200 OK hello from b" request web excluded "$b"
k apply -f - >/dev/null <<EOF
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: { name: default, namespace: shop }
spec: { mtls: { mode: STRICT } }
EOF
is_rejected() { [[ $(request web excluded "$b") != *hello* ]]; }
eventually 60 is_rejected || true
expect "STRICT: plain request of the excluded container" "" "$(request web excluded "$b")"
expect_within 60 "STRICT: request of the application" "HTTP/1.1 200 OK hello from b" request web app b.shop.svc.cluster.local
# Three periods of the readiness probe.
sleep 8
expect "STRICT: the kubelet's probes: pods that are ready" 3 \
    "$(k get pods --namespace shop -o json | jq '[.items[] | select(.status.conditions | any(.type == "Ready" and .status == "True"))] | length')"

say "the redirection is flushed in the running pod web"
pid=$(k get pod --namespace shop web -o json | jq -r '.status.containerStatuses[] | select(.name == "app").containerID' |
    sed 's|.*://||' | enter 1 xargs crictl inspect | jq .info.pid)
address=$(address_of shop web)
# in_web COMMAND…: runs a command in the pod's network namespace.
in_web() {
    enter 1 nsenter --target "$pid" --net "$@"
}
through_envoy() {
    counter web 'cluster.PassthroughCluster.*upstream_cx_total'
}
is_redirected() {
    in_web nft list ruleset | grep -q 'redirect to :15001\|REDIRECT .*15001'
}
rejected() {
    in_web nft -j list chain inet detour-exclusions GUARD_REJECT_OUTBOUND |
        jq '[.nftables[].rule.expr // [] | .[].counter.packets // 0] | add'
}
guard_events() {
    k get events --namespace shop -o json |
        jq '[.items[] | select(.involvedObject.name == "web" and .reason == "DetourGuardRejected")] | length'
}
before_outside=$(connections "$address") before_envoy=$(through_envoy)
# The application connects to the server outside of the mesh until the file exists, and counts the answers.
run web app sh -c 'until [ -e /tmp/end ]; do
        timeout 2 nc 198.51.100.20 443 </dev/null >>/tmp/answers 2>/dev/null
        echo >>/tmp/attempts
        sleep 0.05
    done' &
attempts=$!
eventually 30 run web app test -s /tmp/answers
expect "before: redirected" yes "$(is_redirected && echo yes)"
in_web nft list tables | grep -v detour-exclusions | while read -r _ family name; do
    in_web nft flush table "$family" "$name" </dev/null
done
expect "after the flush: redirected" "" "$(if is_redirected; then echo yes; fi)"
flushed=$SECONDS
expect_within 30 "connections that the guard rejected" '[1-9]*' rejected
eventually 180 is_redirected || true
expect "until the agent repaired it, at most 180 s: redirected" yes "$(is_redirected && echo yes)"
echo "          after $((SECONDS - flushed)) s"
answers=$(run web app wc -l /tmp/answers)
more_answers() { [[ $(run web app wc -l /tmp/answers) != "$answers" ]]; }
eventually 30 more_answers
run web app touch /tmp/end
wait "$attempts"
echo "          $(run web app sh -c 'wc -l </tmp/attempts') attempts, $(run web app sh -c 'wc -l </tmp/answers') answers"
# Envoy's connections to the server are the application's that were captured.
direct() {
    echo $(($(connections "$address") - before_outside - ($(through_envoy) - before_envoy)))
}
expect_within 10 "direct connections that the server outside of the mesh accepted" 0 direct
expect_within 120 "Events DetourGuardRejected" '[1-9]*' guard_events
expect_within 60 "request to b" "HTTP/1.1 200 OK hello from b" request web app b.shop.svc.cluster.local
