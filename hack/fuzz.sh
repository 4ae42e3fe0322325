#!/usr/bin/env bash
# Fuzzes the parsers and the laws of src/fuzzing, guided by coverage (libFuzzer). Each target starts with the golden files
# and sample configurations, the inputs that once failed (fuzz/failed), and those that earlier runs found in
# target/fuzz/corpus. Needs no privileges and no nightly toolchain.
#
# Usage: hack/fuzz.sh [--seconds N] [TARGET…]
#   --seconds N  the time for all targets together, after the build (default 60; 28800 for a night)
#   TARGET       names in the table of src/fuzzing/mod.rs (default: all)
#
# Exits with 1 if a target fails; the output tells how to reproduce it.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh

jobs=2
# The maximum length of an input in bytes.
max_length=16384

mapfile -t all < <(sed -n 's/^    ("\([a-z-]*\)", .*),$/\1/p' src/fuzzing/mod.rs)
seconds=60 targets=()
while [[ $# -gt 0 ]]; do
    case $1 in
        --seconds)
            [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || die "--seconds: invalid value \"${2:-}\"; expected a number"
            seconds=$2
            shift
            ;;
        -*) die "unknown option $1" ;;
        *)
            [[ " ${all[*]} " == *" $1 "* ]] || die "unknown target $1; expected one of: ${all[*]}"
            targets+=("$1")
            ;;
    esac
    shift
done
[[ ${#targets[@]} -gt 0 ]] || targets=("${all[@]}")

need_commands g++=g++ cc=gcc
need_rust
host=$(rustc -vV | sed -n 's/^host: //p')
directory=$(target_directory)/fuzz
findings=$directory/findings
program=$directory/$host/release/detour-fuzz

# Options of the stable compiler: each branch counts its executions, and comparisons report their operands.
coverage=(--cfg fuzzing -C passes=sancov-module -C llvm-args=-sanitizer-coverage-level=4
    -C llvm-args=-sanitizer-coverage-inline-8bit-counters -C llvm-args=-sanitizer-coverage-pc-table
    -C llvm-args=-sanitizer-coverage-trace-compares)
say "building the fuzzer (about four minutes on two cores)"
# Without --locked: the fuzzer's lock file follows the dependencies of Cargo.toml.
RUSTFLAGS="${coverage[*]}" cargo build --quiet --release --manifest-path fuzz/Cargo.toml \
    --target "$host" --target-dir "$directory" </dev/null

# The golden files, their configuration lists, and samples, as the first and as the second section of an input.
seeds=$directory/seeds lists=$directory/lists
rm -rf "$seeds" "$lists"
mkdir -p "$seeds" "$lists"
awk -v lists="$lists" '/^```$/ { close(file); file = ""; next } /^```/ { file = lists "/" ++number; next } file { print >file }' \
    tests/golden/conflist.md tests/golden/own_list.md
find conf manifests/samples tests/golden tests/records "$lists" -type f -size "-$((max_length / 1024))k" | while IFS= read -r file; do
    cp "$file" "$seeds/${file//\//-}"
    { printf '\n====\n' && cat "$file"; } >"$seeds/${file//\//-}.second"
done

# run TARGET SECONDS: fuzzes one target, prints a line about it, and fails if the target fails.
run() {
    local target=$1 log=$directory/$1.log status=0 summary executions new
    local found=$directory/corpus/$target
    mkdir -p "$found" "$findings"
    [[ ! -d fuzz/failed/$target ]] || cp "fuzz/failed/$target"/* "$found"
    TARGET=$target "$program" "$found" "$seeds" -max_total_time="$2" -max_len="$max_length" -timeout=30 \
        -rss_limit_mb=1024 -dict=fuzz/dictionary -artifact_prefix="$findings/$target-" -print_final_stats=1 \
        </dev/null >"$log" 2>&1 || status=$?
    summary=$(grep -aE '^#[0-9]+' "$log" | grep -ao 'cov: [0-9]* ft: [0-9]*' | tail -n 1 || true)
    executions=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    new=$(sed -n 's/^stat::new_units_added: *//p' "$log")
    if [[ $status -eq 0 ]]; then
        printf '%-14s %10s runs  %s  %s new inputs\n' "$target" "${executions:-?}" "${summary:-?}" "${new:-?}"
        return
    fi
    printf '%s%-14s failed%s\n' "$red" "$target" "$plain"
    grep -aE -A 8 'panicked at|^==[0-9]+==|SUMMARY' "$log" | cut -c 1-400 | head -n 40 || tail -n 20 "$log"
    local input
    input=$(sed -n 's/.*Test unit written to //p' "$log" | tail -n 1)
    printf 'reproduce: TARGET=%s %s %s\n' "$target" "$program" "${input:-(see $log)}"
    printf 'then: minimize it (-minimize_crash=1), copy it to fuzz/failed/%s, fix the bug, and run cargo test --lib fuzzing\n' "$target"
    return 1
}

# The targets share the time; two run at once.
share=$((seconds * jobs / ${#targets[@]}))
share=$((share > 0 ? share : 1))
say "fuzzing ${#targets[@]} targets for $share s each, $jobs at once"
failed=0 running=0
for target in "${targets[@]}"; do
    if [[ $running -ge $jobs ]]; then
        wait -n || failed=1
        running=$((running - 1))
    fi
    run "$target" "$share" &
    running=$((running + 1))
done
while [[ $running -gt 0 ]]; do
    wait -n || failed=1
    running=$((running - 1))
done
[[ $failed -eq 0 ]] || die "a target failed"

say "no target failed"
