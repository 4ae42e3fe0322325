#!/usr/bin/env bash
# The chart's modes without Multus, with both rule formats: own list, edited list, primary plugin, beside istio-cni.
# shellcheck source-path=SCRIPTDIR source=../story.sh
source "$(dirname "$0")/../story.sh"

# pods_start DESCRIPTION FORMAT: pods with a sidecar start, have rules of this format, and end without leftovers.
pods_start() {
    local empty pod
    empty=$(leftovers)
    meshed Deployment web '.spec.replicas = 3
        | .spec.template.spec.containers[1].securityContext = { runAsUser: 1000659999, runAsGroup: 1000659999 }
        | .spec.template.spec.initContainers += [.spec.template.spec.initContainers[0]
            + { name: "excluded", securityContext: { runAsUser: 1337 } }]'
    rollout deployment/web
    expect_captured "$1" web 3
    pod=$(k get pods --namespace mesh --selector app=web -o jsonpath='{.items[0].metadata.name}')
    expect "$1: rule format" "$2" "$(in_pod "$pod" nft list tables | grep -q detour-nat && echo nftables || echo iptables)"
    expect "$1: excluded containers" "3 uid 1337: tcp direct, dns direct" "$(reports mesh app=web excluded)"
    # CRI-O calls CHECK after each ADD.
    [[ $RUNTIME != crio ]] || expect_within 30 "$1: calls of CHECK that succeeded" '[1-9]*' calls CHECK
    k delete deployment --namespace mesh web --wait >/dev/null
    eventually 120 prints "" k get pods --namespace mesh -o name
    expect_within 30 "$1: after the pods' end" "$empty" leftovers
    helm uninstall detour --namespace kube-system --wait >/dev/null
}
lists() {
    enter 1 ls /etc/cni/net.d | grep -v kubeconfig | paste -sd ' '
}

up "$RUNTIME" 1
k create namespace mesh >/dev/null
install_detour --set global.platform=kubernetes,config.dialect=nftables
expect "own list: files" "00-detour.conflist 10-net.conflist" "$(lists)"
pods_start "own list" nftables
install_detour --set global.platform=kubernetes,cni.ownList=false,config.dialect=iptables
expect "edited list: plugins of the cluster network" "bridge portmap detour" \
    "$(enter 1 jq -r '.plugins[].type' /etc/cni/net.d/10-net.conflist | paste -sd ' ')"
pods_start "edited list" iptables
expect_within 60 "edited list, uninstalled" "bridge portmap" \
    eval "enter 1 jq -r '.plugins[].type' /etc/cni/net.d/10-net.conflist | paste -sd ' '"
install_detour --set global.platform=kubernetes,provider=default,chained=false,cniConfFileName=00-detour.conf \
    --set primaryPlugin.enabled=true,primaryPlugin.network=net,config.clusterNetwork=/etc/cni/net.d/10-net.conflist,config.dialect=nftables
expect "primary plugin: files" "00-detour.conf 10-net.conflist" "$(lists)"
pods_start "primary plugin" nftables

need_istio_charts
make_images install-cni
load install-cni
helm upgrade --install istio-cni "$(istio_charts)/istio-cni" --namespace istio-system --create-namespace \
    --set image=localhost/install-cni:1,resources.requests.cpu=10m >/dev/null
k --namespace istio-system rollout status daemonset/istio-cni-node --timeout 240s >/dev/null
install_detour --values manifests/chart/values-excludedns.yaml --set global.platform=kubernetes,attachments=null
expect "beside istio-cni: plugins of the cluster network" "*istio-cni*" \
    "$(enter 1 jq -r '.plugins[].type' /etc/cni/net.d/10-net.conflist | paste -sd ' ')"
pods_start "beside istio-cni" iptables
