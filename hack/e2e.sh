#!/usr/bin/env bash
# Runs tests with real container runtimes (containerd 2.2, CRI-O 1.34) and prints a table of the results: containers that
# are excluded by name, boots of a node while the cluster network rewrites its configuration list, and the own list.
# Installs missing packages and builds the components first, once: about five minutes on two cores.
# hack/test.sh does not run these tests. It uses Debian's containerd 1.6.
#
# hack/e2e.sh cluster runs stories of users on a cluster with the real kubelet; see hack/e2e.sh cluster --help.
#
# Usage: hack/e2e.sh cluster [--list] [--keep] [--runtime NAME] [NAME]…
#        hack/e2e.sh [--list] [--debug] [NAME OF TESTS]…
#   --list            print the names of the tests that would run
#   --debug           test the debug build
# Environment: DETOUR_PROGRAM (the binary under test; default: the release build), STARTS (container starts per runtime,
#              default 1000), KILL_STARTS (container starts while the agent is killed, default 200), BOOTS (boots per
#              runtime with an agent, default 50; one tenth of this number for each of four cases without an agent),
#              KEEP (if set: keep the logs and configurations of the nodes in /tmp/detour-runtimes-*)
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ ${1:-} == cluster ]]; then
    exec bash hack/cluster/stories.sh "${@:2}"
fi
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh

usage() {
    echo "e2e.sh: $*; see hack/e2e.sh --help" >&2
    exit 2
}
list='' debug='' names=()
while [[ $# -gt 0 ]]; do
    case $1 in
        --list) list=yes ;;
        --debug) debug=yes ;;
        -*) usage "unknown option \"$1\"" ;;
        *) names+=("$1") ;;
    esac
    shift
done

need_root
need_commands gcc=build-essential strip=binutils jq=jq umoci=umoci ip=iproute2 nft=nftables iptables=iptables curl=curl runc=runc \
    conmon=conmon skopeo=skopeo nsenter=util-linux /usr/lib/cni/bridge=containernetworking-plugins
need_rust
# run_tests ARGUMENT…: runs the test program.
run_tests() {
    cargo test --quiet --locked --test runtimes -- "$@" </dev/null
}
mapfile -t tests < <(run_tests --list --format terse "${names[@]}" | sed -n 's/: test$//p')
[[ ${#tests[@]} -gt 0 ]] || usage "no test matches"
if [[ -n $list ]]; then
    printf '%s\n' "${tests[@]}"
    exit
fi
need_crictl
# The names of tests that need CRI-O.
with_crio='cri_o' wanted=()
grep -qE "$with_crio" <<<"${tests[*]}" && wanted+=(cri-o)
need_runtimes "${wanted[@]}"
if [[ -n $without_crio ]]; then
    mapfile -t tests < <(printf '%s\n' "${tests[@]}" | grep -vE "$with_crio")
    [[ ${#tests[@]} -gt 0 ]] || die "$without_crio"
fi
if [[ -z ${DETOUR_PROGRAM:-} ]]; then
    # A debug build of the agent would dominate the times.
    profile=release
    [[ -z $debug ]] || profile=dev
    say "building"
    build_static "$profile" --bin detour
    DETOUR_PROGRAM=$(target_directory)/$target/${profile/dev/debug}/detour
    export DETOUR_PROGRAM
fi
export STARTS=${STARTS:-1000} KILL_STARTS=${KILL_STARTS:-200} BOOTS=${BOOTS:-50}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
say "running ${#tests[@]} tests (with the defaults 35 minutes for all)"
status=0
# They measure times: one at a time.
run_tests --nocapture --test-threads 1 --exact "${tests[@]}" 2>&1 | tee "$log" || status=1
if grep -q 'RESULT|' "$log"; then
    echo
    say "results"
    sed -n 's/^.*RESULT|//p' "$log" | sort -t '|' -s -k 1,1 | column -t -s '|'
fi
if [[ -n $without_crio ]]; then
    say "$without_crio; its tests were skipped"
fi
exit "$status"
