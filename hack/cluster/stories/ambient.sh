#!/usr/bin/env bash
# Ambient mode: istio-cni's real node agent with a stand-in for ztunnel; exclusions before, with and after enrollment.
# shellcheck source-path=SCRIPTDIR source=../story.sh
source "$(dirname "$0")/../story.sh"

captured='uid 2000: tcp sidecar, dns sidecar' direct='uid 2000: tcp direct, dns direct'
# reaches DESCRIPTION POD PATTERN: waits until the application reports this.
reaches() {
    expect_within 90 "$1: $2" "$3" logs amb "$2" app
}
# plain_pod NAME ANNOTATIONS(JSON): a pod without a sidecar.
plain_pod() {
    sed "s/NAME/$1/" hack/cluster/pods/meshed.yaml | k create --dry-run=client -o json -f - |
        jq --argjson annotations "$2" '.metadata.namespace = "amb" | .metadata.annotations = $annotations
            | .spec.containers |= [.[0]]' | k apply -f - >/dev/null
}

up "$RUNTIME" 1
need_istio_charts
make_images install-cni
load install-cni
gcc -static -O1 -o "$cluster/bin/sidecar" hack/cluster/sidecar.c
k create namespace istio-system >/dev/null
k create namespace amb >/dev/null
helm upgrade --install istio-cni "$(istio_charts)/istio-cni" --namespace istio-system \
    --set profile=ambient,image=localhost/install-cni:1,resources.requests.cpu=10m >/dev/null
enter 1 bash hack/cluster/node.sh start ztunnel
k --namespace istio-system rollout status daemonset/istio-cni-node --timeout 240s >/dev/null
install_detour --values manifests/chart/values-ambient.yaml
exclusions='{"detour.io/exclude-uids": "2000", "detour.io/exclude-dns": "all"}'

say "pods that start enrolled"
k label namespace amb istio.io/dataplane-mode=ambient >/dev/null
plain_pod plain '{}'
plain_pod excluded "$exclusions"
ready 120 amb
expect "with enrollment: the first container of plain" "$captured" "$(logs amb plain first)"
expect "with enrollment: the first container of excluded" "$direct" "$(logs amb excluded first)"
reaches "with enrollment" plain "$captured"
reaches "with enrollment" excluded "$direct"

say "exclusions of an enrolled pod"
k annotate pod --namespace amb plain detour.io/exclude-uids=2000 >/dev/null
reaches "after enrollment: annotated" plain "$direct"
k annotate pod --namespace amb plain detour.io/exclude-uids- >/dev/null
reaches "after enrollment: annotation removed" plain "$captured"

say "a running pod with exclusions is enrolled later"
k label namespace amb istio.io/dataplane-mode- >/dev/null
reaches "not enrolled" plain "$direct"
k label namespace amb istio.io/dataplane-mode=ambient >/dev/null
reaches "enrolled again" plain "$captured"
reaches "enrolled again" excluded "$direct"

say "restarts of istio-cni's agent and of detour's"
k rollout restart --namespace istio-system daemonset/istio-cni-node >/dev/null
k rollout status --namespace istio-system daemonset/istio-cni-node --timeout 240s >/dev/null
k rollout restart --namespace kube-system daemonset/detour-agent >/dev/null
k rollout status --namespace kube-system daemonset/detour-agent --timeout 240s >/dev/null
sleep 4
reaches "after the restarts" plain "$captured"
reaches "after the restarts" excluded "$direct"
plain_pod later "$exclusions"
ready 120 amb
expect "a pod that starts now: its first container" "$direct" "$(logs amb later first)"
sed 's/^/          ztunnel: /' "$cluster/node1/logs/ztunnel.log" | grep -E 'connected|add|delete' | tail -5
