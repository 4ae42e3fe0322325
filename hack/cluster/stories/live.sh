#!/usr/bin/env bash
# Exclusion of a container by its name, and policy of running pods, with the kubelet's container IDs and control groups.
# shellcheck source-path=SCRIPTDIR source=../story.sh
source "$(dirname "$0")/../story.sh"

chain='[{"type": "istio-redirect"}, {"type": "container-exclude"}, {"type": "uid-exclude"}, {"type": "dns-exclude"}]'
captured='uid 2000: tcp sidecar, dns sidecar'
# takes_effect SECONDS DESCRIPTION PATTERN: waits until the running application reports this.
takes_effect() {
    local began=$SECONDS
    expect_within "$1" "$2: the application" "$3" logs mesh vault app
    echo "          after $((SECONDS - began)) s"
}

up "$RUNTIME" 1
k create namespace mesh >/dev/null
install_detour --set containerExclusion.enabled=true --set-json "config.chain=$chain"
meshed Pod vault '.metadata.annotations["detour.io/exclude-containers"] = "vault-agent-init"
    | .spec.initContainers += [.spec.initContainers[0] + { name: "vault-agent-init" }]'
ready 120 mesh
expect "the container without exclusion" "uid 2000: tcp lost, dns lost" "$(logs mesh vault first)"
expect "the excluded container, with the same UID" "uid 2000: tcp direct, dns direct" "$(logs mesh vault vault-agent-init)"
takes_effect 60 "running pod" "$captured"
k annotate pod --namespace mesh vault traffic.sidecar.istio.io/excludeOutboundPorts=443 >/dev/null
takes_effect 90 "the pod's annotation with an excluded port" "uid 2000: tcp direct, dns sidecar"
k annotate pod --namespace mesh vault traffic.sidecar.istio.io/excludeOutboundPorts- >/dev/null
takes_effect 90 "the annotation removed" "$captured"
k annotate namespace mesh detour.io/exclude-uids=2000 >/dev/null
takes_effect 90 "the namespace's annotation with an excluded UID" "uid 2000: tcp direct, dns direct"
k annotate namespace mesh detour.io/exclude-uids- >/dev/null
takes_effect 90 "the annotation removed" "$captured"
k annotate pod --namespace mesh vault detour.io/exclude-uids=nonsense >/dev/null
quoting_events() {
    k get events --namespace mesh -o json | jq '[.items[] | select(.involvedObject.name == "vault" and (.message | test("nonsense")))] | length'
}
expect_within 60 "an invalid annotation: Events that quote it" '[1-9]*' quoting_events
k annotate pod --namespace mesh vault detour.io/exclude-uids- >/dev/null
takes_effect 60 "after an invalid annotation" "$captured"
# The kubelet refreshes the ConfigMap's volume.
install_detour --set containerExclusion.enabled=true --set-json "config.chain=$(jq -c '.[2].uids = ["2000"]' <<<"$chain")"
takes_effect 180 "the configuration with an excluded UID" "uid 2000: tcp direct, dns direct"
install_detour --set containerExclusion.enabled=true --set-json "config.chain=$chain"
takes_effect 180 "the configuration without it" "$captured"

say "time until a change of an annotation is in the kernel"
pid=$(enter 1 crictl inspect "$(enter 1 crictl ps --name '^app$' --state Running --quiet)" | jq .info.pid)
# has_rule UID: whether the pod excludes it.
has_rule() {
    enter 1 nsenter --target "$pid" --net nft list table inet detour-exclusions | grep -qw "$1"
}
for ((i = 1; i <= 20; i++)); do
    began=$(date +%s%N)
    k annotate pod --namespace mesh vault --overwrite "detour.io/exclude-uids=$((3000 + i))" >/dev/null
    PAUSE=0.05 eventually 60 has_rule "$((3000 + i))"
    echo $((($(date +%s%N) - began) / 1000000))
done | sort -n >"$cluster/times"
expect "changes that took effect" 20 "$(wc -l <"$cluster/times")"
sed -n '10s/$/ ms: median, with the time of kubectl and nft/p; 20s/$/ ms: maximum/p' "$cluster/times" | sed 's/^/          /'
