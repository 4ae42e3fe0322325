#!/usr/bin/env bash
# Pushes the image and the chart of a release, which hack/release.sh built and signed, to its registry: HUB/detour and
# HUB/charts/detour. Signs both by digest, and verifies the signatures. A published version never changes. Log in with
# docker login first.
#
# --sign KEY  the private key of cosign that signed SHA256SUMS; $COSIGN_PASSWORD is the key's password
#
# Usage: hack/publish.sh --sign KEY DIRECTORY
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh

[[ $# -eq 3 && $1 == --sign ]] || die "expected --sign KEY DIRECTORY; see hack/publish.sh --help"
key=$(realpath "$2") release=$(realpath "$3")
need_commands skopeo=skopeo
need_helm
need_cosign
cosign=$(tools_directory)/cosign

images=("$release"/detour-v*-image.tar)
[[ -f ${images[0]} ]] || die "$release: no image; build the release with hack/release.sh, without --dry-run"
[[ -f $release/SHA256SUMS.sig ]] || die "$release: not signed; build the release with hack/release.sh --sign"
(cd "$release" && sha256sum --quiet --check SHA256SUMS)
"$cosign" verify-blob --key "$release/cosign.pub" --insecure-ignore-tlog=true --signature "$release/SHA256SUMS.sig" \
    "$release/SHA256SUMS"
version=${images[0]##*/detour-v}
version=${version%-image.tar}
hub=$(tar -xzOf "$release/detour-$version.tgz" detour/values.yaml | sed -n 's/^  hub: //p')
# Registries on this machine have no TLS.
insecure=() helm_insecure=()
if [[ $hub == 127.0.0.1:* ]]; then
    insecure=(--tls-verify=false) helm_insecure=(--plain-http)
fi

# digest SOURCE: prints the digest of an image or an index.
digest() {
    local manifest
    manifest=$(mktemp)
    skopeo inspect --raw "${insecure[@]}" "$1" >"$manifest" && echo "sha256:$(sha256sum <"$manifest" | cut -d ' ' -f 1)"
    rm "$manifest"
}

# Signs a reference by digest, with all images of an index, because some runtimes verify only the image for their platform.
sign() {
    "$cosign" sign --yes --recursive --key "$key" --tlog-upload=false "$1"
    "$cosign" verify --key "$release/cosign.pub" --insecure-ignore-tlog=true --output text "$1" >/dev/null
    say "published and signed $1"
}

image=$(digest "oci-archive:${images[0]}:$version")
published=$(digest "docker://$hub/detour:$version" 2>/dev/null) || true
[[ -z $published || $published == "$image" ]] ||
    die "$hub/detour:$version: exists with the digest $published, expected $image; choose a new version"
skopeo copy --quiet --all "${insecure[@]/#--/--dest-}" "oci-archive:${images[0]}:$version" "docker://$hub/detour:$version"
[[ $(digest "docker://$hub/detour:$version") == "$image" ]] || die "$hub/detour:$version: its digest is not $image"
sign "$hub/detour@$image"

chart=$("$(tools_directory)/helm" push "${helm_insecure[@]}" "$release/detour-$version.tgz" "oci://$hub/charts" 2>&1 |
    sed -n 's/^Digest: //p')
[[ $chart == sha256:* ]] || die "helm push: expected the digest of the chart, got \"$chart\""
sign "$hub/charts/detour@$chart"
