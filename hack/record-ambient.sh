#!/usr/bin/env bash
# Records the rules that Istio's node agent writes into the network namespace of a pod in the ambient mesh, in both formats
# and families: tests/golden/ambient.v4.rules, ambient.v6.rules and ambient.nft. The code is that of Istio, in the version of
# tests/ambient_rules/go.mod. Needs Go 1.26, root, iptables and nft, and takes about three minutes on two cores.
#
# Usage: hack/record-ambient.sh
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh

need_root
need_go "Istio's node agent"
golden=tests/golden work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
say "building Istio's rules"
(cd tests/ambient_rules && go build -trimpath -o "$work/ambient-rules" .)
say "recording"
# The inner shell expands its own arguments.
# shellcheck disable=SC2016
unshare --net bash -ec '
ip link set lo up
"$1/ambient-rules" iptables >"$1/log" 2>&1 || { cat "$1/log" >&2; exit 1; }
for family in 4 6; do
    program=iptables-save
    [[ $family == 4 ]] || program=ip6tables-save
    "$program" | sed "/^#/d; /^:INPUT\|^:FORWARD\|^:POSTROUTING/d; s/\[[0-9]*:[0-9]*\]/[0:0]/" >"$2/ambient.v$family.rules"
done' bash "$work" "$golden"
# shellcheck disable=SC2016
unshare --net bash -ec '
ip link set lo up
"$1/ambient-rules" nftables >"$1/log" 2>&1 || { cat "$1/log" >&2; exit 1; }
nft --stateless list ruleset inet >"$2/ambient.nft"' bash "$work" "$golden"
