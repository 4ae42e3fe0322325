#!/usr/bin/env bash
# Builds the image for the manifests: an OCI layout in target/image with one index for all architectures. The image
# contains only the static binary. The script needs no container daemon. The same sources and compilers give the same
# image.
#
# Usage: hack/image.sh [--arch LIST] [TAG]
#   LIST  amd64, arm64 or both (default: amd64,arm64)
#   TAG   default: the crate's version
# Push it with: skopeo copy --all oci:target/image:TAG docker://REGISTRY/detour:TAG
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh

architectures=amd64,arm64
if [[ ${1:-} == --arch ]]; then
    architectures=${2:?--arch: expected a list, for example amd64,arm64}
    shift 2
fi
IFS=, read -ra architectures <<<"$architectures"

need_commands gcc=build-essential jq=jq skopeo=skopeo umoci=umoci
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
tag=${1:-$version}
# The image uses the time of the last commit instead of the current time.
epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
created=$(date --utc --date="@$epoch" +%Y-%m-%dT%H:%M:%SZ)

# pack ARCHITECTURE BINARY: adds an image to the layout, tagged with the architecture.
pack() {
    install -D -m 0755 "$2" "$work/$1/detour"
    tar --create --file "$work/$1.tar" --directory "$work/$1" --format ustar \
        --mtime "@$epoch" --owner 0 --group 0 --numeric-owner detour
    umoci new --image "$layout:$1"
    umoci raw add-layer --image "$layout:$1" --history.created "$created" --history.created_by "detour $version" \
        "$work/$1.tar"
    umoci config --image "$layout:$1" --no-history --created "$created" \
        --os linux --architecture "$1" \
        --config.entrypoint /detour --config.user 0:0 \
        --config.label "org.opencontainers.image.title=detour" \
        --config.label "org.opencontainers.image.version=$version" \
        --config.label "org.opencontainers.image.licenses=Apache-2.0"
}

# Joins the images of umoci, one per tag, into one index with the requested tag.
join() {
    local type=application/vnd.oci.image.index.v1+json digest
    jq --arg type "$type" '{
        schemaVersion: 2, mediaType: $type,
        manifests: [.manifests[] | {
            mediaType, digest, size,
            platform: { os: "linux", architecture: .annotations["org.opencontainers.image.ref.name"] }
        }]
    }' "$layout/index.json" >"$work/index"
    digest=$(sha256sum <"$work/index" | cut -d ' ' -f 1)
    cp "$work/index" "$layout/blobs/sha256/$digest"
    jq --null-input --arg type "$type" --arg digest "sha256:$digest" --arg tag "$tag" \
        --argjson size "$(stat -c %s "$work/index")" '{
        schemaVersion: 2,
        manifests: [{
            mediaType: $type, digest: $digest, size: $size,
            annotations: { "org.opencontainers.image.ref.name": $tag }
        }]
    }' >"$layout/index.json"
}

# check ARCHITECTURE EMULATOR: checks that a node of this architecture pulls only a binary, and that the binary runs.
check() {
    local pulled="$work/pulled-$1" layer answer
    skopeo copy --quiet --override-arch "$1" "oci:$layout:$tag" "dir:$pulled"
    layer=$(jq -r '.layers | if length == 1 then .[0].digest else error("not one layer") end' "$pulled/manifest.json")
    tar -xvf "$pulled/${layer#sha256:}" --directory "$pulled" >"$work/files"
    [[ $(<"$work/files") == detour ]] || die "image linux/$1: expected only the file detour, got $(paste -sd ' ' "$work/files")"
    [[ $(skopeo inspect --override-arch "$1" --format '{{.Os}}/{{.Architecture}}' "oci:$layout:$tag") == "linux/$1" ]] ||
        die "image linux/$1: the platform in its configuration is another one"
    answer=$(CNI_COMMAND=VERSION ${2:+"$2"} "$pulled/detour")
    jq --exit-status '.supportedVersions | length > 0' <<<"$answer" >/dev/null || die "image linux/$1: VERSION: expected supportedVersions, got $answer"
    printf 'linux/%s: binary %s bytes, pulled %s bytes, runs%s\n' "$1" "$(stat -c %s "$pulled/detour")" \
        "$(jq '[.config.size, .layers[].size] | add' "$pulled/manifest.json")" "${2:+ under $2}"
}

directory=$(target_directory)
layout="$directory/image"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf "$layout"
umoci init --layout "$layout"
declare -A emulators
for architecture in "${architectures[@]}"; do
    build_for "$architecture"
    emulators[$architecture]=$emulator
    say "building for linux/$architecture (the first time: several minutes)"
    build_static release --bin detour
    pack "$architecture" "$directory/$target/release/detour"
done
umoci gc --layout "$layout"
join
say "$layout:$tag"
for architecture in "${architectures[@]}"; do
    check "$architecture" "${emulators[$architecture]}"
done
