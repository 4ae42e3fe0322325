#!/usr/bin/env bash
# Runs tests with real components and prints tables of the results. The matrix: each runtime (containerd 2.2, CRI-O
# 1.34) with each mode of the plugin (attachment of Multus, entry in the cluster network's configuration list,
# configuration list of its own, primary plugin) and each rule format. Each cell has a real API server and the agent as
# the chart installs it, and goes from the installation to the removal, with faults and an upgrade. One test compares
# the plugin's rules with those of the real istio-cni. The other tests: containers that are excluded by name, boots of a
# node while the cluster network rewrites its configuration list, and live policy.
# Installs missing packages and builds the components first, once: about five minutes on two cores, three more for
# istio-cni, which only the comparison of rules needs (Go 1.26), and four more for kube-apiserver.
# hack/test.sh does not run these tests. It uses Debian's containerd 1.6.
#
# hack/e2e.sh cluster runs stories of users on a cluster with the real kubelet; see hack/e2e.sh cluster --help.
#
# Usage: hack/e2e.sh cluster [--list] [--keep] [NAME]…
#        hack/e2e.sh [--list] [--quick] [--debug] [--runtime NAME] [--mode NAME] [--dialect NAME] [--ignored]
#                    [NAME OF TESTS]…
#   --list            print the names of the tests that would run
#   --quick           run only the matrix, with one measured pod per cell
#   --debug           test the debug build
#   --runtime NAME    of the matrix, run only cells with containerd or cri-o
#   --mode NAME       … with attachment, chained, own-list or primary
#   --dialect NAME    … with iptables or nftables
#   --ignored         run tests that only measure, such as boots_with_the_edited_list
# With --quick, --runtime, --mode or --dialect, only the matrix runs. With --quick, two cells run at the same time.
# Environment: DETOUR_PROGRAM (the binary under test; default: the release build), PODS (measured pods per cell, default
#              20, with --quick 1), STARTS (container starts per runtime, default 1000), KILL_STARTS (container starts
#              while the agent is killed, default 200), BOOTS (boots per runtime with an agent, default 50; one tenth
#              of this number for each of four cases without an agent),
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
# one_of OPTION VALUE EXPECTED…: prints the value as it is in the names of tests.
one_of() {
    local option=$1 value=$2 expected
    shift 2
    for expected in "$@"; do
        if [[ $value == "$expected" ]]; then
            echo "${value//-/_}"
            return
        fi
    done
    usage "$option: invalid value \"$value\"; expected one of: $*"
}
list='' quick='' debug='' runtime='[a-z_]*' mode='[a-z_]*' dialect='[a-z]*' only_matrix='' ignored=() names=()
while [[ $# -gt 0 ]]; do
    case $1 in
        --list) list=yes ;;
        --quick) quick=yes only_matrix=yes ;;
        --debug) debug=yes ;;
        --runtime | --mode | --dialect)
            [[ $# -gt 1 ]] || usage "$1: expected a value"
            only_matrix=yes
            case $1 in
                --runtime) runtime=$(one_of "$1" "$2" containerd cri-o) ;;
                --mode) mode=$(one_of "$1" "$2" attachment chained own-list primary) ;;
                --dialect) dialect=$(one_of "$1" "$2" iptables nftables) ;;
            esac
            shift
            ;;
        --ignored) ignored=(--ignored) ;;
        -*) usage "unknown option \"$1\"" ;;
        *) names+=("$1") ;;
    esac
    shift
done

if [[ -n $only_matrix && ${#names[@]} -gt 0 ]]; then
    usage "expected no names of tests with --quick, --runtime, --mode and --dialect, got ${names[*]}"
fi
# The names of cells are matrix::RUNTIME::MODE::DIALECT.
pattern=.
if [[ -n $only_matrix ]]; then
    pattern="^matrix::$runtime::$mode::$dialect\$"
fi

need_root
need_commands gcc=build-essential strip=binutils jq=jq umoci=umoci ip=iproute2 nft=nftables iptables=iptables curl=curl runc=runc \
    conmon=conmon skopeo=skopeo nsenter=util-linux etcd=etcd-server /usr/lib/cni/bridge=containernetworking-plugins
need_rust
# run_tests ARGUMENT…: runs the test program.
run_tests() {
    cargo test --quiet --locked --test runtimes -- "$@" </dev/null
}
mapfile -t tests < <(run_tests --list --format terse "${ignored[@]}" "${names[@]}" | sed -n 's/: test$//p' | grep -E "$pattern")
[[ ${#tests[@]} -gt 0 ]] || usage "no test matches"
if [[ -n $list ]]; then
    printf '%s\n' "${tests[@]}"
    exit
fi
need_crictl
need_helm
need_apiserver
# The names of tests that need CRI-O or istio-cni.
with_crio='cri_o|the_commands_of_the_guide|edited_list' wanted=()
grep -qE "$with_crio" <<<"${tests[*]}" && wanted+=(cri-o)
grep -q matrix::comparison <<<"${tests[*]}" && wanted+=(istio-cni)
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
    build_static "$profile" --bin detour --example measure
    built=$(target_directory)/$target/${profile/dev/debug}
    export DETOUR_PROGRAM=$built/detour MEASURE=$built/examples/measure
fi
export STARTS=${STARTS:-1000} KILL_STARTS=${KILL_STARTS:-200} BOOTS=${BOOTS:-50} PODS=${PODS:-20}
# Tests measure times: one at a time. Cells mostly wait.
threads=1
if [[ -n $quick ]]; then
    PODS=1 threads=2
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
say "running ${#tests[@]} tests (with the defaults 60 minutes for all, with --quick six minutes)"
status=0
run_tests --nocapture --test-threads "$threads" "${ignored[@]}" --exact "${tests[@]}" 2>&1 | tee "$log" || status=1
if grep -q 'CELL|' "$log"; then
    echo
    say "matrix: checks that passed, those that failed, time of a pod's start and of the plugin's ADD (milliseconds)"
    {
        echo "runtime|mode|dialect|passed|failed|start: median|max|ADD: median|max"
        sed -n 's/^.*CELL|//p' "$log" | sort
    } | column -t -s '|'
fi
if grep -q 'RESULT|' "$log"; then
    echo
    say "results"
    sed -n 's/^.*RESULT|//p' "$log" | sort -t '|' -s -k 1,1 | column -t -s '|'
fi
if [[ -n $without_crio ]]; then
    say "$without_crio; its tests were skipped"
fi
exit "$status"
