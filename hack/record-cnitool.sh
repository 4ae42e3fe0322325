#!/usr/bin/env bash
# Records in tests/golden/cnitool.json what plugins see when libcni, driven by cnitool, calls them. Tests compare
# detour's own calls of plugins with the record. Run this script only after a change of the cases in
# tests/primary/delegates/cnitool.rs. It needs Go and root (cnitool saves results below /var/lib/cni and removes them).
#
# Usage: hack/record-cnitool.sh
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
PATH=$tools:$PATH UPDATE_GOLDEN=1 cargo test --locked --quiet --test primary \
    delegates::cnitool::plugins_get_the_input_of_the_reference_library
