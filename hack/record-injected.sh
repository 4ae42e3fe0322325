#!/usr/bin/env bash
# Records the pods of tests/golden/injected/pods.yaml after injection by Istio's injector on OpenShift, in
# tests/golden/injected/excludedns.yaml, with the injection template of manifests/openshift-service-mesh. The injector is the webhook of istiod, in
# the version of tests/injector/go.mod. Run this script only after a change of the template or of the pods. It needs
# Go 1.26 and takes about four minutes on two cores.
#
# Usage: hack/record-injected.sh
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh

need_helm
need_istio_charts
golden=tests/golden/injected patch=manifests/openshift-service-mesh/injection-template.yaml
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
say "building the injector"
(cd tests/injector && go build -o "$work/injector" .)
say "recording"
# The values are the last part of the patch.
sed -n '/^  values:$/,$ s/^    //p' "$patch" >"$work/values.yaml"
"$(tools_directory)/helm" template default-istiod "$(istio_charts)/istio-control/istio-discovery" --kube-version 1.33.0 \
    --namespace istio-system --set global.platform=openshift --values "$work/values.yaml" >"$work/istiod.yaml"
{
    echo "# Recorded by hack/record-injected.sh: the injector's values, and the pods of pods.yaml after injection"
    cat "$work/values.yaml"
    PLATFORM=openshift "$work/injector" "$work/istiod.yaml" "$golden/namespace.yaml" <"$golden/pods.yaml"
} >"$work/excludedns.yaml"
mv "$work/excludedns.yaml" "$golden/excludedns.yaml"
