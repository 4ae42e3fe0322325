#!/usr/bin/env bash
# Runs stories of users on a cluster of real components (hack/cluster.sh): detour's image and chart, the kubelet, the
# scheduler, runtimes and Multus. Each story has a new cluster, prints what it saw, and compares where traffic arrived with
# what the configuration requires: outside of the cluster, a server and tcpdump record the packets. At the end, a table of
# all stories. Exits with 1 if a check failed.
#
# Usage: hack/e2e.sh cluster [--list] [--keep] [--runtime NAME] [NAME]…
#   --list           print the names of the stories
#   --keep           leave the cluster of the first story that fails, for hack/cluster.sh enter with
#                    CLUSTER=target/cluster-e2e
#   --runtime NAME   containerd (default) or crio
#   NAME             run only these stories (default: all)
# Environment: CLUSTER (the cluster's directory, default: target/cluster-e2e), DETOUR_PROGRAM (the static binary in detour's
# image; default: the release build)
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source-path=SCRIPTDIR source=../machine.sh
source hack/machine.sh
# shellcheck source-path=SCRIPTDIR source=functions.sh
source hack/cluster/functions.sh
usage() {
    echo "e2e.sh cluster: $*; see hack/e2e.sh cluster --help" >&2
    exit 2
}
stories=(seeds mesh modes istio-cni multus multus-thick node product boots live ambient)
directory=hack/cluster/stories
keep='' names=() RUNTIME=containerd
while [[ $# -gt 0 ]]; do
    case $1 in
        --list)
            printf '%s\n' "${stories[@]}"
            exit
            ;;
        --keep) keep=yes ;;
        --runtime)
            [[ ${2:-} == containerd || ${2:-} == crio ]] || usage "--runtime: invalid value \"${2:-}\"; expected containerd or crio"
            RUNTIME=$2
            shift
            ;;
        -*) usage "unknown option \"$1\"" ;;
        *)
            [[ " ${stories[*]} " == *" $1 "* ]] || usage "unknown story \"$1\"; expected one of: ${stories[*]}"
            names+=("$1")
            ;;
    esac
    shift
done
[[ ${#names[@]} -gt 0 ]] || names=("${stories[@]}")

need_root
use_cluster "${CLUSTER:-$(target_directory)/cluster-e2e}"
RESULTS=$(mktemp) table=$(mktemp) status=0 kept=''
export RESULTS RUNTIME
trap '[[ -n $kept ]] || down; rm -f "$RESULTS" "$table"' EXIT
for story in "${names[@]}"; do
    down
    say "$story: $(sed -n '2s/^# //p' "$directory/$story.sh")"
    : >"$RESULTS"
    began=$SECONDS
    bash "$directory/$story.sh" || echo failed >>"$RESULTS"
    failed=$(grep -c failed "$RESULTS" || true)
    echo "$story|$RUNTIME|$(grep -c ok "$RESULTS" || true)|$failed|$((SECONDS - began)) s" >>"$table"
    if [[ $failed -gt 0 ]]; then
        status=1
        kept=$keep
        [[ -z $keep ]] || die "story $story failed; its cluster runs: CLUSTER=$cluster hack/cluster.sh enter bash"
    fi
    down
done
say "results"
{
    echo "story|runtime|checks that passed|failed|time"
    cat "$table"
} | column -t -s '|'
exit "$status"
