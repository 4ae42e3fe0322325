#!/usr/bin/env bash
# Prints the software bill of materials (SBOM) of this version in CycloneDX 1.6 JSON: every package in Cargo.lock with its
# license, checksum and dependencies. The property "detour:use" states what a package is used for:
#
#   linked   part of the program for amd64 or arm64; only these packages have the scope "required"
#   build    used by the compiler only: procedural macros, build scripts
#   other    used by tests, or on other platforms
#
# The standard library and musl are not in Cargo.lock: the compiler, whose version is in metadata.tools, contains them.
#
# Usage: hack/sbom.sh
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh

# packages EDGES: prints the "NAME VERSION" of the packages that the program needs through these edges.
packages() {
    local machine
    for machine in x86_64 aarch64; do
        cargo tree --locked --edges "$1" --target "$machine-unknown-linux-musl" --prefix none --format '{p}' </dev/null
    done | sed -E 's/^([^ ]+) v([^ ]+).*/\1 \2/' | LC_ALL=C sort -u
}

need_commands jq=jq >&2
epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cargo metadata --locked --format-version 1 </dev/null >"$work/metadata"
packages normal,no-proc-macro >"$work/linked"
packages no-dev >"$work/built"
# "NAME VERSION CHECKSUM" of each package that has a checksum.
awk -F '"' '/^name = / { name = $2 } /^version = / { version = $2 } /^checksum = / { print name, version, $2 }' \
    Cargo.lock >"$work/checksums"
# The same sources give the same serial number: a UUID (version 8) from the digest of Cargo.lock and the program's version.
serial=$({ cat Cargo.lock; cargo pkgid --locked; } | sha256sum |
    sed -E 's/^(.{8})(.{4}).(.{3}).(.{3})(.{12}).*/urn:uuid:\1-\2-8\3-a\4-\5/')

jq --null-input --slurpfile metadata "$work/metadata" --arg serial "$serial" \
    --arg time "$(date --utc --date="@$epoch" +%Y-%m-%dT%H:%M:%SZ)" --arg rustc "$(rustc --version | cut -d ' ' -f 2)" \
    --rawfile linked "$work/linked" --rawfile built "$work/built" --rawfile checksums "$work/checksums" '
    def lines: rtrimstr("\n") | split("\n");
    def set: map({ (.): true }) | add;
    def key: "\(.name) \(.version)";
    def purl: "pkg:cargo/\(.name)@\(.version)";
    def licenses:
        if .license then [{ expression: (.license | gsub(" */ *"; " OR ")) }]
        elif .license_file then [{ license: { name: .license_file } }]
        else [] end;

    $metadata[0] as $graph
    | $graph.resolve.root as $root
    | ($linked | lines | set) as $linked
    | ($built | lines | set) as $built
    | ($checksums | lines | map(split(" ") | { "\(.[0]) \(.[1])": .[2] }) | add) as $checksums
    | ($graph.packages | map({ (.id): purl }) | add) as $purls
    | def component: {
        type: "library", "bom-ref": purl, name, version, purl: purl, licenses: licenses
      };
      {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        bomFormat: "CycloneDX", specVersion: "1.6", serialNumber: $serial, version: 1,
        metadata: {
            timestamp: $time,
            tools: { components: [{ type: "application", name: "rustc", version: $rustc }] },
            component: ($graph.packages[] | select(.id == $root) | component + { type: "application" })
        },
        components: [
            $graph.packages | sort_by(.name, .version)[] | select(.id != $root)
            | (if $linked[key] then "linked" elif $built[key] then "build" else "other" end) as $use
            | component + {
                scope: (if $use == "linked" then "required" else "excluded" end),
                properties: [{ name: "detour:use", value: $use }]
            }
            # A package of this repository has no checksum.
            + (if $checksums[key] then { hashes: [{ alg: "SHA-256", content: $checksums[key] }] } else {} end)
        ],
        dependencies: [
            $graph.resolve.nodes | sort_by($purls[.id])[]
            | { ref: $purls[.id], dependsOn: (.dependencies | map($purls[.]) | unique) }
        ]
    }'
