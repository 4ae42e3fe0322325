#!/usr/bin/env bash
# The rules of the real istio-cni, run by Multus, compared with those of detour for the same pod.
# shellcheck source-path=SCRIPTDIR source=../story.sh
source "$(dirname "$0")/../story.sh"

# rules NAME NETWORK FILTER: the rules of a pod with this attachment, without times and counters.
rules() {
    # istio-cni writes rules of both families only with this variable.
    meshed Pod "$1" ".metadata.annotations[\"k8s.v1.cni.cncf.io/networks\"] = \"$2\"
        | .spec.containers[1].env += [{ name: \"ISTIO_DUAL_STACK\", value: \"true\" }] | $3"
    k wait --namespace mesh --for condition=Ready "pod/$1" --timeout 120s >/dev/null
    in_pod "$1" sh -c 'iptables-save && ip6tables-save' 2>/dev/null | sed '/^#/d; /^:/s/ \[.*//'
}

up "$RUNTIME" 1
need_istio istio-cni
k create namespace mesh >/dev/null
install_multus 0.3.1
# Pods of both families.
network=$(enter 1 jq '.ipam.ranges += [[{ subnet: "fd00:85::/64" }]]' /etc/cni/cluster/10-net.conf)
enter 1 tee /etc/cni/cluster/10-net.conf <<<"$network" >/dev/null
enter 1 cp "$tools/runtimes/istio-cni" /var/lib/cni/bin/real-istio-cni
enter 1 install -D -m 0600 /etc/cni/net.d/multus.d/multus.kubeconfig /etc/cni/istio/istio-cni-kubeconfig
jq --null-input '{ apiVersion: "k8s.cni.cncf.io/v1", kind: "NetworkAttachmentDefinition",
    metadata: { name: "real", namespace: "default" }, spec: { config: ({
        cniVersion: "0.3.1", name: "real", type: "real-istio-cni", plugin_log_level: "info", cni_agent_run_dir: "/etc/cni/istio",
        exclude_namespaces: ["istio-system", "kube-system"] } | tojson) } }' | k apply -f - >/dev/null
install_detour --set 'global.platform=openshift,config.dialect=iptables,config.chain[0].type=istio-redirect'
while IFS='|' read -r name filter; do
    real=$(rules "$name-real" default/real "$filter")
    own=$(rules "$name-detour" default/istio-cni "$filter")
    # The one deviation: 15008 is exempt under TPROXY too.
    [[ $name != tproxy ]] ||
        own=$(sed '/^\*mangle/,/^COMMIT/{/^-A ISTIO_INBOUND -p tcp -m tcp --dport 15008 -j RETURN$/d}' <<<"$own")
    expect "$name: rules of istio-cni" '[1-9]*' "$(grep -c ISTIO_ <<<"$real" || true)"
    expect "$name: differences" "" "$(diff <(echo "$real") <(echo "$own") || true)"
done <<'PODS'
plain|.
lists|.metadata.annotations += { "traffic.sidecar.istio.io/excludeInboundPorts": "8081,8082", "traffic.sidecar.istio.io/excludeOutboundPorts": "9000", "traffic.sidecar.istio.io/excludeOutboundIPRanges": "10.1.0.0/16" }
tproxy|.metadata.annotations["sidecar.istio.io/interceptionMode"] = "TPROXY"
PODS
