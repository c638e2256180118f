#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# Builds the fuzz targets, runs each for the same time and prints a table of their runs.
#   bash tests/fuzz/run.sh [--seconds N] [--jobs N] [--max-len N] [TARGET...]
# Exit code 1: some target found something, or does not build.
set -euo pipefail
cd "$(dirname "$0")/../.."

seconds=60
jobs=1
max_len=4096
targets=()
while [ $# -gt 0 ]; do
  case "$1" in
    --seconds) seconds=$2; shift 2 ;;
    --jobs | -j) jobs=$2; shift 2 ;;
    --max-len) max_len=$2; shift 2 ;;
    -*) echo "usage: $0 [--seconds N] [--jobs N] [--max-len N] [TARGET...]" >&2; exit 2 ;;
    *) targets+=("$1"); shift ;;
  esac
done
if [ ${#targets[@]} -eq 0 ]; then
  for source in tests/fuzz/*_target.cc; do
    name=$(basename "$source" _target.cc)
    targets+=("$name")
  done
fi

cmake --preset fuzz > /dev/null
ninja -C build/fuzz "${targets[@]/#/fuzz_}" > build/fuzz/build.log || {
  tail -20 build/fuzz/build.log >&2
  exit 1
}

# One target; its libFuzzer output goes into build/fuzz/logs.
run_target() {
  local name=$1 program="build/fuzz/bin/fuzz_$1"
  local seeds="build/fuzz/seeds/$name" found="build/fuzz/found/$name" broken="build/fuzz/broken/$name"
  mkdir -p "$found" "$broken" build/fuzz/logs
  "$program" --seeds="$seeds"
  "$program" -max_len="$max_len" -max_total_time="$seconds" -print_final_stats=1 \
    -artifact_prefix="$broken/" "$found" "$seeds" > "build/fuzz/logs/$name" 2>&1 || true
}

for name in "${targets[@]}"; do
  while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
  run_target "$name" &
done
wait

# The number behind a word of the last line that has it; 0: none.
last() { grep -oE "$2[: ]+[0-9]+" "build/fuzz/logs/$1" | tail -1 | grep -oE '[0-9]+$' || echo 0; }
failed=0
printf '| target | executions | a second | edges | features | corpus | found |\n|---|---|---|---|---|---|---|\n'
for name in "${targets[@]}"; do
  result=nothing
  if grep -qE 'ERROR: |SUMMARY: ' "build/fuzz/logs/$name"; then
    result=$(grep -E 'SUMMARY: ' "build/fuzz/logs/$name" | head -1 | cut -c1-60)
    failed=1
  elif ! grep -q 'stat::number_of_executed_units' "build/fuzz/logs/$name"; then
    result="did not end: build/fuzz/logs/$name"
    failed=1
  fi
  printf '| %s | %s | %s | %s | %s | %s | %s |\n' "$name" \
    "$(last "$name" number_of_executed_units)" "$(last "$name" average_exec_per_sec)" \
    "$(last "$name" cov)" "$(last "$name" ft)" "$(ls "build/fuzz/found/$name" | wc -l)" "$result"
done
exit $failed
