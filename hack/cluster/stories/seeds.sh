#!/usr/bin/env bash
# An init container as UID 1337, before the sidecar runs: lost without exclusions, direct with them.
# shellcheck source-path=SCRIPTDIR source=../story.sh
source "$(dirname "$0")/../story.sh"

# The names of the pods, and the value of k8s.v1.cni.cncf.io/networks: attachments of the namespace and of default, in
# each form of the annotation.
declare -A networks=(
    [without]=default/redirect-only
    [own-namespace]=istio-cni
    [default-namespace]=default/istio-cni
    [comma]='default/redirect-only, default/excludedns'
    [annotation]=default/by-annotation
    [container]=default/by-annotation
)

up "$RUNTIME" 1
install_multus 1.0.0
k apply -f hack/cluster/pods/shop.yaml >/dev/null
install_detour --set global.platform=openshift,containerExclusion.enabled=true --set-json 'attachments=[
    {"name": "istio-cni", "namespaces": ["shop"]},
    {"name": "redirect-only", "chain": [{"type": "istio-redirect"}]},
    {"name": "excludedns", "chain": [
        {"type": "uid-exclude", "uids": ["1337"]}, {"type": "dns-exclude", "uids": ["1337"]}]},
    {"name": "by-annotation", "chain": [
        {"type": "istio-redirect"}, {"type": "uid-exclude"}, {"type": "container-exclude"}]}]'
run_chart_test
record_packets
for name in "${!networks[@]}"; do
    annotations=("k8s.v1.cni.cncf.io/networks=${networks[$name]}")
    case $name in
        annotation) annotations+=(detour.io/exclude-uids=1337) ;;
        container) annotations+=(detour.io/exclude-containers=vault-agent-init) ;;
    esac
    sed "s/NAME/$name/" hack/cluster/pods/vault.yaml | k annotate --local -f - -o json "${annotations[@]}" | k apply -f - >/dev/null
done
ready 240 shop
for name in $(printf '%s\n' "${!networks[@]}" | sort); do
    address=$(address_of shop "$name") seen=direct
    [[ $name != without ]] || seen=lost
    expect "$name (${networks[$name]}): the init container" "uid 1337: tcp $seen, dns $seen" "$(logs shop "$name" vault-agent-init)"
    expect_within 60 "$name: the application" "uid 1000650000: tcp sidecar, dns sidecar" logs shop "$name" app
    expect "$name: connections that the server outside accepted from $address" \
        "$([[ $name == without ]] && echo 0 || echo 1)" "$(connections "$address")"
    packets "$address"
done
k delete --namespace shop pods --all --wait --timeout 120s >/dev/null
expect "after the pods' end: files of state" 0 "$(enter 1 find /run/detour -type f -path '*state*' | wc -l)"
