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

up "${RUNTIME:-containerd}" 1
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
