#!/usr/bin/env bash
# Builds all files of a release in target/release-VERSION. The same commit and compilers give the same files, except for
# signatures. The script publishes nothing.
#
# --check            only check that the sources are ready for the release
# --dry-run PROGRAM  pack PROGRAM instead of release builds, build no image, and report failed checks as warnings
# --hub HUB          the registry of the image, such as ghcr.io/OWNER; required except with --check and --dry-run
# --sign KEY         sign SHA256SUMS with a private key of cosign; $COSIGN_PASSWORD is the key's password
#
# Usage: hack/release.sh [--check] [--dry-run PROGRAM] [--hub HUB] [--sign KEY] VERSION
# $REPOSITORY_URL, if set, is the address that the sources must name. hack/publish.sh publishes the image and the chart.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh

check_only=false program='' hub='' key=''
while [[ ${1:-} == --* ]]; do
    case $1 in
        --check) check_only=true ;;
        --dry-run)
            program=$(realpath "${2:?--dry-run: expected a program}")
            shift
            ;;
        --hub)
            hub=${2:?--hub: expected a registry}
            shift
            ;;
        --sign)
            key=$(realpath "${2:?--sign: expected a private key}")
            shift
            ;;
        *) die "unknown option \"$1\"" ;;
    esac
    shift
done
version=${1:?expected a version, for example 0.2.0}
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.]+)?$ ]] || die "version: expected MAJOR.MINOR.PATCH, got \"$version\""
[[ -z $program || -x $program ]] || die "--dry-run: $program is not executable"
[[ $hub =~ ^[a-z0-9._:/-]*$ ]] || die "--hub: expected a registry in lower case, such as ghcr.io/owner, got \"$hub\""
[[ -z $key || -r $key ]] || die "--sign: can't read $key"

# equal WHAT FOUND [EXPECTED]: records a problem unless FOUND is the version, or EXPECTED.
equal() {
    [[ $2 == "${3:-$version}" ]] || problems+=("$1: expected ${3:-$version}, got \"$2\"")
}

# field FILE EXPRESSION: prints the first match of the group in a regular expression.
field() {
    sed -nE "s/^$2\$/\1/p" "$1" | head -1
}

# Prints the section of this version in the changelog, without its heading.
notes() {
    awk -v heading="## $version - " '/^## / { inside = index($0, heading) == 1; next } inside' CHANGELOG.md |
        sed '/./,$!d'
}

# Checks that all files have this version and are committed.
check_sources() {
    problems=()
    local platform digest tagged address=${REPOSITORY_URL:-$repository}
    digest=$(hack/manifests.sh --digest)
    if [[ -z $address ]]; then
        problems+=("Cargo.toml: repository: missing; expected the address of these sources")
    else
        equal "Cargo.toml: repository" "$repository" "$address"
        equal "manifests/chart/Chart.yaml: home" "$(field manifests/chart/Chart.yaml 'home: (.*)')" "$address"
    fi
    equal "Cargo.toml: version" "$(field Cargo.toml 'version = "(.*)"')"
    equal "Cargo.lock: detour-cni" "$(grep -A 1 '^name = "detour-cni"$' Cargo.lock | sed -nE 's/^version = "(.*)"$/\1/p')"
    equal "manifests/chart/Chart.yaml: version" "$(field manifests/chart/Chart.yaml 'version: "?([^"]*)"?')"
    equal "manifests/chart/Chart.yaml: appVersion" "$(field manifests/chart/Chart.yaml 'appVersion: "?([^"]*)"?')"
    for platform in kubernetes openshift; do
        equal "manifests/$platform/rendered.yaml: tag of the image" \
            "$(field "manifests/$platform/rendered.yaml" ' *image: "?[^ "]*:([^:" ]*)"?')"
        grep -qxF "# Chart: $digest" "manifests/$platform/rendered.yaml" ||
            problems+=("manifests/$platform/rendered.yaml: not rendered from this chart; run hack/manifests.sh")
    done
    if ! grep -qE "^## ${version//./\\.} - [0-9]{4}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md; then
        problems+=("CHANGELOG.md: expected a section \"## $version - YYYY-MM-DD\"")
    elif [[ -z $(notes) ]]; then
        problems+=("CHANGELOG.md: section \"$version\" is empty")
    fi
    ! grep -q '^## Unreleased' CHANGELOG.md ||
        problems+=("CHANGELOG.md: section \"Unreleased\" found; rename it to \"$version - YYYY-MM-DD\"")
    [[ -z $(git status --porcelain) ]] ||
        problems+=("git: the working tree has changes; commit them")
    if tagged=$(git rev-parse --quiet --verify "refs/tags/v$version^{commit}") && [[ $tagged != "$(git rev-parse HEAD)" ]]; then
        problems+=("git: tag v$version exists at another commit than HEAD; choose a new version")
    fi
}

# pack DIRECTORY: prints a reproducible tar archive of a directory's files.
pack() (
    cd "$1"
    tar --create --format ustar --sort name --mtime "@$epoch" --owner 0 --group 0 --numeric-owner \
        --mode u=rwX,go=rX -- *
)

compress() {
    gzip --no-name --best
}

repository=$(field Cargo.toml 'repository = "(.*)"')
check_sources
for problem in "${problems[@]}"; do
    printf '%s: %s%s\n' "$(basename "$0")" "${program:+warning: }" "$problem" >&2
done
if [[ ${#problems[@]} -gt 0 && -z $program ]]; then
    die "sources: not ready for release $version: ${#problems[@]} problems"
fi
if "$check_only"; then
    say "sources: ready for release $version"
    exit
fi

need_commands gcc=build-essential jq=jq
[[ -n $hub || -n $program ]] || die "--hub: missing; expected the registry of the image, such as ghcr.io/owner"
: "${hub:=registry.invalid}"
need_rust
[[ -n $program ]] || has_rust || die "releases are built with Rust $rust"
need_helm
[[ -z $key ]] || need_cosign
epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH=$epoch
target_directory=$(target_directory)
helm=$(tools_directory)/helm
release="$target_directory/release-$version${program:+-dry-run}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf "$release"
mkdir -p "$release"

say "program and image"
if [[ -z $program ]]; then
    hack/image.sh "$version"
    # Not compressed: the layers are.
    pack "$target_directory/image" >"$release/detour-v$version-image.tar"
fi
declare -A machines=([amd64]=x86_64 [arm64]=aarch64)
for architecture in "${!machines[@]}"; do
    mkdir "$work/$architecture"
    install -m 0755 "${program:-$target_directory/${machines[$architecture]}-unknown-linux-musl/release/detour}" \
        "$work/$architecture/detour"
    cp LICENSE "$work/$architecture/LICENSE"
    pack "$work/$architecture" | compress >"$release/detour-v$version-linux-$architecture.tar.gz"
done

say "chart and manifests"
"$helm" lint --strict --quiet manifests/chart
# helm stores the current time in the package. Therefore the script packs it again.
"$helm" package manifests/chart --destination "$work" >/dev/null
mkdir "$work/chart"
tar -xzmf "$work/detour-$version.tgz" --directory "$work/chart"
# In the sources, the chart has no registry, and hack/manifests.sh renders the bases with one that does not exist.
sed -i "s|^  hub: .*|  hub: $hub|" "$work/chart/detour/values.yaml"
sed -i 's/ Required, because no image is published\.//' "$work/chart/detour/values.yaml" "$work/chart/detour/README.md"
pack "$work/chart" | compress >"$release/detour-$version.tgz"
for platform in kubernetes openshift; do
    sed "s|registry\\.invalid/|$hub/|" "manifests/$platform/rendered.yaml" \
        >"$release/detour-v$version-$platform.yaml"
    # The packed chart renders to the same objects.
    "$helm" template detour "$release/detour-$version.tgz" --skip-tests --kube-version 1.33.0 --namespace kube-system \
        --set "global.platform=$platform" |
        diff - <(sed -e '/^# Rendered from /d' -e '/^# Chart: /d' "$release/detour-v$version-$platform.yaml") ||
        die "chart package: the objects for $platform differ from manifests/$platform/rendered.yaml"
done

# The manifest for krew's index: its name is the plugin's name.
sums() {
    sha256sum "$release/detour-v$version-linux-$1.tar.gz" | cut -d ' ' -f 1
}
sed -e "s/SHA256_AMD64/$(sums amd64)/" -e "s/SHA256_ARM64/$(sums arm64)/" -e "s/VERSION/$version/g" \
    -e "s|REPOSITORY|$repository|" manifests/krew/detour.yaml >"$release/detour.yaml"
# Each archive that the manifest names exists and has the checksum that follows its name.
sed -nE 's|^ *-? *uri: .*/([^/"]*)"?$|\1|p; s|^ *-? *sha256: "?([0-9a-f]*)"?$|\1|p' "$release/detour.yaml" |
    paste -d ' ' - - | awk '{ print $2 "  " $1 }' >"$work/krew"
[[ $(wc -l <"$work/krew") -eq ${#machines[@]} ]] || die "manifests/krew/detour.yaml: expected a uri and a sha256 for each of ${!machines[*]}"
(cd "$release" && sha256sum --quiet --check "$work/krew") || die "manifests/krew/detour.yaml: expected the names and checksums of the archives"

say "SBOM, notes, checksums"
hack/sbom.sh >"$release/detour-v$version-sbom.cdx.json"
# The page of a release is in no directory of the sources: links to files need their address.
notes | sed -E "s#\]\(([A-Za-z][^):]*\.md)#](${repository:+$repository/blob/v$version/}\1#g" >"$release/notes.md"
(cd "$release" && find . -type f ! -name SHA256SUMS -printf '%P\n' | LC_ALL=C sort | xargs sha256sum) >"$work/SHA256SUMS"
mv "$work/SHA256SUMS" "$release/SHA256SUMS"
if [[ -n $key ]]; then
    say "signature"
    cosign=$(tools_directory)/cosign
    # With a local key, nothing is sent to a transparency log.
    "$cosign" sign-blob --yes --key "$key" --tlog-upload=false --output-signature "$release/SHA256SUMS.sig" \
        "$release/SHA256SUMS"
    "$cosign" public-key --key "$key" --outfile "$release/cosign.pub"
    "$cosign" verify-blob --key "$release/cosign.pub" --insecure-ignore-tlog=true \
        --signature "$release/SHA256SUMS.sig" "$release/SHA256SUMS"
fi

(cd "$release" && sha256sum --quiet --check SHA256SUMS)
say "$release"
(cd "$release" && find . -type f -printf '%9s  %P\n' | LC_ALL=C sort -k 2)
