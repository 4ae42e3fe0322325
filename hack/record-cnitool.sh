#!/usr/bin/env bash
# Records what the reference's runtime library, driven by cnitool, shows to plugins, in
# tests/golden/cnitool.json: tests hold this project's own runs of plugins against it. Only needed
# when the scenes in tests/delegates/cnitool.rs change. Needs Go and root (cnitool keeps results
# below /var/lib/cni, and takes them away again).
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh

need_root
need_commands go=golang-go
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
say "building cnitool"
GOBIN=$tools go install github.com/containernetworking/cni/cnitool@v1.3.0
say "recording"
PATH=$tools:$PATH UPDATE_GOLDEN=1 cargo test --locked --quiet --test delegates \
    cnitool::plugins_see_what_the_reference_shows_them
