#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# Runs the checks and timings that need a GPU, from programs built before: correctness, timings,
# then compute-sanitizer where it is installed. --quick leaves that out. With CRUMB_COMMIT set, the
# timings are written as JSON too, under that name.
#   tests/gpu.sh BUILD_DIR [OUTPUT_DIR] [--quick]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${1:?usage: tests/gpu.sh BUILD_DIR [OUTPUT_DIR] [--quick]}
output=${2:-$(mktemp -d)}
quick=${3:-}
code=0

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
for test in "$build"/tests/kernels_cuda_*_test "$build"/tests/client_cuda_*_test \
  "$build"/tests/models_cuda_*_test "$build"/tests/bench_cuda_*_test; do
  timeout 200 "$test" >"$output/$(basename "$test").log" 2>&1 || code=1
  grep -E '^\[  (FAILED|PASSED) |Failure|error [0-9]' "$output/$(basename "$test").log" | tail -n 60
  # What needs two GPUs says so on a machine with one.
  if grep '\[  SKIPPED \] .*\.' "$output/$(basename "$test").log" | grep -qv 'Peers'; then
    echo "$(basename "$test"): skipped tests on a machine with a GPU"
    code=1
  fi
done
timeout 240 "$build/bin/crumb-kernel-bench" || code=1
if [[ -n "${CRUMB_COMMIT:-}" ]]; then
  timeout 240 "$build/bin/crumb-kernel-bench" --json --commit "$CRUMB_COMMIT" \
    >"$output/kernel_bench.json" || code=1
fi
timeout 120 "$build/bin/crumb-decode-bench" --shape qwen3-4b,qwen3-8b,glm-4.7 || code=1
if [[ -n "${CRUMB_COMMIT:-}" ]]; then
  timeout 120 "$build/bin/crumb-decode-bench" --shape qwen3-4b,qwen3-8b,glm-4.7 \
    --json --commit "$CRUMB_COMMIT" \
    >"$output/decode_bench.json" || code=1
fi
timeout 300 python3 deploy/demo.py --bin "$build/bin" --device cuda || code=1
timeout 400 "$build/bin/crumb-device-bench" || code=1
if [[ -n "${CRUMB_COMMIT:-}" ]]; then
  timeout 400 "$build/bin/crumb-device-bench" --json --commit "$CRUMB_COMMIT" \
    >"$output/device_bench.json" || code=1
fi
timeout 60 "$build/bin/crumb-device-hit-bench" || code=1
if [[ -n "${CRUMB_COMMIT:-}" ]]; then
  timeout 60 "$build/bin/crumb-device-hit-bench" --json --commit "$CRUMB_COMMIT" \
    >"$output/device_hit.json" || code=1
fi
if [[ "$quick" != --quick ]] && command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck synccheck initcheck; do
    echo "compute-sanitizer $tool"
    for test in decode evict verify serving append paged_kv prefill; do
      timeout 120 compute-sanitizer --tool "$tool" --error-exitcode 9 \
        "$build/tests/kernels_cuda_${test}_test" \
        --gtest_filter='*LengthsAround*:*PaddedEntries*:*SameBytes*:*ReportsTheTile*:*GrowOverEvery*:*WritesTheNew*' \
        >"$output/$tool.$test.log" 2>&1 || code=1
      echo "$test: $(grep -E 'SUMMARY|ERROR' "$output/$tool.$test.log" | tail -n 1)"
    done
  done
fi
exit "$code"
