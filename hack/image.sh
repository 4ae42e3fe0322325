#!/usr/bin/env bash
# Builds the image for the manifests: an OCI layout in target/image with one index for all architectures. The image
# contains only the static binary, and its user is not root. The script needs no container daemon. The same sources and
# compilers give the same image.
#
# Usage: hack/image.sh [--arch LIST] [--binaries DIR] [--output DIR] [TAG]
#   --arch LIST     amd64, arm64 or both (default: amd64,arm64)
#   --binaries DIR  pack DIR/detour-ARCH instead of a release build
#   --output DIR    directory of the OCI layout (default: target/image)
#   TAG             default: the crate's version
# Push it with: skopeo copy --all oci:target/image:TAG docker://REGISTRY/detour:TAG
set -euo pipefail

start=$PWD
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh

# from_start PATH: prints the absolute path of a path that is relative to the directory of the caller.
from_start() {
    (cd "$start" && realpath --canonicalize-missing "$1")
}
architectures=amd64,arm64 binaries='' layout=''
while [[ ${1:-} == -* ]]; do
    [[ -n ${2:-} ]] || die "$1: expected a value; see hack/image.sh --help"
    case $1 in
        --arch) architectures=$2 ;;
        --binaries) binaries=$(from_start "$2") ;;
        --output) layout=$(from_start "$2") ;;
        *) die "unknown option \"$1\"; expected --arch, --binaries or --output" ;;
    esac
    shift 2
done
IFS=, read -ra architectures <<<"$architectures"

need_commands gcc=build-essential jq=jq skopeo=skopeo umoci=umoci
# field KEY: prints a field of Cargo.toml.
field() {
    sed -n "s/^$1 = \"\(.*\)\"/\1/p" Cargo.toml | head -1
}
version=$(field version)
tag=${1:-$version}
# The image uses the time of the last commit instead of the current time.
epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
created=$(date --utc --date="@$epoch" +%Y-%m-%dT%H:%M:%SZ)
revision=$(git rev-parse HEAD)
[[ -z $(git status --porcelain) ]] || revision+=-dirty
repository=$(sed -n 's/^home: //p' manifests/chart/Chart.yaml)
# The commands that read manifests need no permissions. The manifests set another user where root is needed.
user=65532:65532

# The labels of each image and the annotations of the index (OCI image specification, "Pre-Defined Annotation Keys").
# There is no base image, and so no label for it.
labels=$(jq --null-input \
    --arg created "$created" --arg version "$version" --arg revision "$revision" --arg repository "$repository" \
    --arg description "$(field description)" --arg licenses "$(field license)" '{
        title: "detour", $description, $version, $revision, $created, $licenses,
        vendor: "The detour authors", source: $repository, url: $repository,
        documentation: "\($repository)/blob/v\($version)/README.md"
    } | with_entries(.key |= "org.opencontainers.image." + .)')

# pack LAYOUT ARCHITECTURE BINARY: adds an image to a layout, tagged with the architecture.
pack() {
    local directory="$work/$2" label
    local -a flags=()
    while IFS= read -r label; do
        flags+=(--config.label "$label")
    done < <(jq --raw-output 'to_entries[] | "\(.key)=\(.value)"' <<<"$labels")
    install -D -m 0755 "$3" "$directory/detour"
    tar --create --file "$directory.tar" --directory "$directory" --format ustar \
        --mtime "@$epoch" --owner 0 --group 0 --numeric-owner detour
    umoci new --image "$1:$2"
    umoci raw add-layer --image "$1:$2" --history.created "$created" --history.created_by "detour $version" \
        "$directory.tar"
    umoci config --image "$1:$2" --no-history --created "$created" --os linux --architecture "$2" \
        --config.entrypoint /detour --config.user "$user" "${flags[@]}"
}

# join LAYOUT: joins the images of umoci, one per tag, into one index with the requested tag.
join() {
    local type=application/vnd.oci.image.index.v1+json digest
    umoci gc --layout "$1"
    jq --arg type "$type" --argjson labels "$labels" '{
        schemaVersion: 2, mediaType: $type,
        manifests: [.manifests[] | {
            mediaType, digest, size,
            platform: { os: "linux", architecture: .annotations["org.opencontainers.image.ref.name"] }
        }],
        annotations: $labels
    }' "$1/index.json" >"$work/index"
    digest=$(sha256sum <"$work/index" | cut -d ' ' -f 1)
    cp "$work/index" "$1/blobs/sha256/$digest"
    jq --null-input --arg type "$type" --arg digest "sha256:$digest" --arg tag "$tag" \
        --argjson size "$(stat -c %s "$work/index")" '{
        schemaVersion: 2,
        manifests: [{
            mediaType: $type, digest: $digest, size: $size,
            annotations: { "org.opencontainers.image.ref.name": $tag }
        }]
    }' >"$1/index.json"
}

# build LAYOUT: packs the binaries of all architectures into one index.
build() {
    local architecture
    rm -rf "$1"
    umoci init --layout "$1"
    for architecture in "${architectures[@]}"; do
        pack "$1" "$architecture" "${programs[$architecture]}"
    done
    join "$1"
}

# check ARCHITECTURE EMULATOR: checks that a node of this architecture pulls only a binary, that the image's user and
# labels are as intended, and that the binary runs.
check() {
    local pulled="$work/pulled-$1" layer config answer
    skopeo copy --quiet --override-arch "$1" "oci:$layout:$tag" "dir:$pulled"
    layer=$(jq -r '.layers | if length == 1 then .[0].digest else error("not one layer") end' "$pulled/manifest.json")
    tar -xvf "$pulled/${layer#sha256:}" --directory "$pulled" >"$work/files"
    [[ $(<"$work/files") == detour ]] || die "image linux/$1: expected only the file detour, got $(paste -sd ' ' "$work/files")"
    config=$(skopeo inspect --config --override-arch "$1" "oci:$layout:$tag")
    jq --exit-status --arg architecture "$1" --arg user "$user" --argjson labels "$labels" '
        .os == "linux" and .architecture == $architecture and .created == $labels["org.opencontainers.image.created"]
        and .config == { User: $user, Entrypoint: ["/detour"], Labels: $labels }
    ' <<<"$config" >/dev/null || die "image linux/$1: expected this platform, user $user and labels $labels, got $config"
    answer=$(CNI_COMMAND=VERSION ${2:+"$2"} "$pulled/detour")
    jq --exit-status '.supportedVersions | length > 0' <<<"$answer" >/dev/null || die "image linux/$1: VERSION: expected supportedVersions, got $answer"
    printf 'linux/%s: binary %s bytes, pulled %s bytes, user %s, runs%s\n' "$1" "$(stat -c %s "$pulled/detour")" \
        "$(jq '[.config.size, .layers[].size] | add' "$pulled/manifest.json")" "$user" "${2:+ under $2}"
}

directory=$(target_directory)
: "${layout:=$directory/image}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
declare -A programs emulators
for architecture in "${architectures[@]}"; do
    build_for "$architecture"
    emulators[$architecture]=$emulator
    if [[ -n $binaries ]]; then
        programs[$architecture]=$binaries/detour-$architecture
        [[ -f ${programs[$architecture]} ]] || die "--binaries: ${programs[$architecture]} not found"
    else
        say "building for linux/$architecture (the first time: several minutes)"
        build_static release --bin detour
        programs[$architecture]=$directory/$target/release/detour
    fi
done
build "$layout"
say "$layout:$tag"
for architecture in "${architectures[@]}"; do
    check "$architecture" "${emulators[$architecture]}"
done
# A second image of the same binaries must be the same one: digests of blobs are in the index.
build "$work/again"
cmp "$layout/index.json" "$work/again/index.json" || die "image: not reproducible: two images of the same binaries differ"
say "reproducible: $(jq -r '.manifests[0].digest' "$layout/index.json")"
