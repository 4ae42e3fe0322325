#!/usr/bin/env bash
# Checks the packages of Cargo.lock with cargo-deny (deny.toml): licenses, sources, forbidden packages, and known
# vulnerabilities. For the vulnerabilities, it downloads RustSec's database from GitHub. If it can't, it says so and ends
# with success.
#
# --online  fail if the database can't be downloaded
#
# Usage: hack/deny.sh [--online]
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh

need_rust
need_cargo_deny
deny=("$(tools_directory)/cargo-deny" --locked)
"${deny[@]}" check bans licenses sources </dev/null
if output=$(timeout 120 "${deny[@]}" fetch db </dev/null 2>&1); then
    "${deny[@]}" check advisories </dev/null
else
    problem="known vulnerabilities: NOT checked: can't download RustSec's database: $(grep . <<<"$output" | tail -n 1)"
    [[ ${1:-} != --online ]] || die "$problem"
    say "$problem"
fi
