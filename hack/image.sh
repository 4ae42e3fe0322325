#!/usr/bin/env bash
# Builds the image that the manifests run: the static binary and nothing else, as an OCI layout in
# target/image, for this machine's architecture. No daemon is needed. The same sources give the same
# image.
#
# Usage: hack/image.sh [TAG]     (default: the crate's version)
# Push it with: skopeo copy oci:target/image:TAG docker://REGISTRY/detour:TAG
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh

need_commands gcc=build-essential umoci=umoci
need_rust
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
tag=${1:-$version}
case "$(uname -m)" in
    x86_64) architecture=amd64 ;;
    aarch64) architecture=arm64 ;;
    *) architecture=$(uname -m) ;;
esac

say "building"
build_static --bin detour
directory=$(target_directory)
binary="$directory/$target/release/detour" layout="$directory/image"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The time of the last commit stands for now wherever an image has a time.
epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
created=$(date --utc --date="@$epoch" +%Y-%m-%dT%H:%M:%SZ)
install -D -m 0755 "$binary" "$work/files/detour"
touch --date="@$epoch" "$work/files/detour" "$work/files"

say "packing"
rm -rf "$layout"
umoci init --layout "$layout"
umoci new --image "$layout:$tag"
umoci insert --image "$layout:$tag" --history.created "$created" --history.created_by "detour $version" \
    "$work/files/detour" /detour
umoci config --image "$layout:$tag" --no-history --created "$created" \
    --os linux --architecture "$architecture" \
    --config.entrypoint /detour --config.user 0:0 \
    --config.label "org.opencontainers.image.title=detour" \
    --config.label "org.opencontainers.image.version=$version" \
    --config.label "org.opencontainers.image.licenses=Apache-2.0"
umoci gc --layout "$layout"

echo "image:  $layout:$tag (linux/$architecture)"
echo "binary: $(stat -c %s "$binary") bytes"
echo "pulled: $(find "$layout/blobs" -type f -printf '%s\n' | awk '{ sum += $1 } END { print sum }') bytes"
