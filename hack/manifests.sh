#!/usr/bin/env bash
# Writes the chart's README from its values, and renders the chart into the kustomize bases next to it.
#
# --check   compare these files with the chart, and check the chart's configuration with detour validate
# --digest  print the chart's digest, which each base contains; does not need helm
#
# Usage: hack/manifests.sh [--check|--digest]
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh

digest() {
    find manifests/chart -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c 1-16
}

if [[ ${1:-} == --digest ]]; then
    digest
    exit
fi

# No image is published: a base names a registry that can't exist (RFC 2606), which a kustomization replaces.
render() {
    local platform=$1
    echo "# Rendered from manifests/chart by hack/manifests.sh for $platform. Do not edit."
    echo "# Chart: $(digest)"
    "$(tools_directory)/helm" template detour manifests/chart --skip-tests --kube-version 1.33.0 --namespace kube-system \
        --set "global.platform=$platform" --set hub=registry.invalid
}

need_helm
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
stale=false invalid=false
readme=(cargo test --locked --quiet --test chart -- --exact readme::the_table_is_written_from_the_values)
if [[ ${1:-} == --check ]]; then
    "${readme[@]}" </dev/null >&2 || stale=true
else
    UPDATE_GOLDEN=1 "${readme[@]}" </dev/null >/dev/null
fi
for platform in kubernetes openshift; do
    render "$platform" >"$work/rendered.yaml"
    if [[ ${1:-} == --check ]]; then
        diff -u "manifests/$platform/rendered.yaml" "$work/rendered.yaml" || stale=true
        cargo run --locked --quiet -- validate "$work/rendered.yaml" || invalid=true
    else
        cp "$work/rendered.yaml" "manifests/$platform/rendered.yaml"
    fi
done
! "$invalid" || die "the chart's configuration: detour validate rejects it"
! "$stale" || die "chart README or kustomize bases: they differ from the chart; run hack/manifests.sh"
