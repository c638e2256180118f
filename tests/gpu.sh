#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# Everything that needs a GPU in one call, on a machine with one: builds for its architecture, runs
# the checks, the timings, and compute-sanitizer where it is installed. Ends with what failed.
#   tests/gpu.sh [--programs DIR] [--output DIR] [--commit NAME] [--quick]
# --programs DIR  take DIR/bin, DIR/lib and DIR/tests, built before; nothing is built
# --output DIR    for logs; without it, a new temporary folder
# --commit NAME   write the timings to the output folder as JSON, too, under this name
# --quick         no compute-sanitizer
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

programs='' output='' commit='' quick=''
while [[ $# -gt 0 ]]; do
  case "$1" in
    --programs) programs=${2:?--programs needs a folder}; shift 2 ;;
    --output) output=${2:?--output needs a folder}; shift 2 ;;
    --commit) commit=${2:?--commit needs a name}; shift 2 ;;
    --quick) quick=yes; shift ;;
    -h|--help) sed -n '4,10s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "gpu.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
  esac
done

devices=$(nvidia-smi --query-gpu=name,compute_cap,driver_version --format=csv,noheader 2>/dev/null)
if [[ $? -ne 0 || -z "$devices" ]]; then
  echo "gpu.sh: nvidia-smi shows no GPU: run this on a machine with an NVIDIA GPU and its driver" >&2
  exit 1
fi
echo "$devices"

if [[ -z "$programs" ]]; then
  if [[ -z "${CUDACXX:-}" ]] && ! command -v nvcc >/dev/null; then
    echo "gpu.sh: no nvcc: install the CUDA toolkit and put it on PATH, or name programs that were" \
      "built elsewhere with --programs DIR" >&2
    exit 1
  fi
  programs=build/gpu
  # 9.0 to 90a: Hopper's kernels use what only this very architecture has.
  architecture=$(echo "$devices" | head -n 1 | cut -d, -f2 | tr -d ' .')
  [[ "$architecture" != 90 ]] || architecture=90a
  bash deploy/install_packages.sh --tests || exit 1
  cmake --preset release -B "$programs" -DCRUMB_CUDA=ON \
    -DCMAKE_CUDA_ARCHITECTURES="$architecture-real" || exit 1
  cmake --build "$programs" --target crumb_gpu_programs || exit 1
fi
tests=("$programs"/tests/*_cuda_*_test)
if [[ ! -x "${tests[0]}" ]]; then
  echo "gpu.sh: $programs/tests has no tests for GPUs: it was built without CUDA, or is none" >&2
  exit 1
fi
output=${output:-$(mktemp -d)}
mkdir -p "$output" || exit 1

failed=()
# NAME SECONDS PROGRAM...
attempt() {
  timeout "$2" "${@:3}" || failed+=("$1")
}

for test in "${tests[@]}"; do
  name=$(basename "$test") log="$output/$(basename "$test").log"
  attempt "$name" 200 "$test" >"$log" 2>&1
  grep -E '^\[  (FAILED|PASSED) |Failure|error [0-9]' "$log" | tail -n 60
  # Two devices, or newer ones, may not be here; a device is.
  skips=$(grep -A 1 ': Skipped$' "$log" | grep -vE ': Skipped$|^--$' | sort | uniq -c)
  [[ -z "$skips" ]] || printf '%s skipped:\n%s\n' "$name" "$skips"
  if grep -qvE '^$|needs (two CUDA devices|compute capability)' <<<"$skips"; then
    failed+=("$name (skipped)")
  fi
done
attempt client_c_api_test 200 python3 tests/client/c_api_test.py --build "$programs" \
  CApiTest.test_device_program
attempt demo 300 python3 deploy/demo.py --bin "$programs/bin" --device cuda

# PROGRAM SECONDS JSON_FILE ARGUMENTS...
time_program() {
  attempt "$1" "$2" "$programs/bin/$1" "${@:4}"
  [[ -n "$commit" ]] || return 0
  attempt "$1 --json" "$2" "$programs/bin/$1" "${@:4}" --json --commit "$commit" >"$output/$3.json"
}
time_program crumb-kernel-bench 240 kernels
time_program crumb-decode-bench 120 decode --shape qwen3-4b,qwen3-8b,glm-4.7
time_program crumb-device-bench 400 device
time_program crumb-device-hit-bench 60 device_hit

sanitize() {
  if ! command -v compute-sanitizer >/dev/null; then
    echo "compute-sanitizer: not installed, left out"
    return
  fi
  local filter='*LengthsAround*:*PaddedEntries*:*SameBytes*:*ReportsTheTile*:*GrowOverEvery*:*WritesTheNew*'
  filter+=':*LooksAt*:*ReportsTheRun*:*WindowsAreCopied*:*DecodeOfDrafts*:*AgreeWithSums*'
  # racecheck of 2025.3.1 names hazards across a __syncthreads in blocks of clusters; 2026.4 does not
  # (docs/kernels/decode.md).
  local version clusters=yes
  version=$(compute-sanitizer --version | grep -oE 'Version [0-9.]+' | cut -d' ' -f2)
  [[ "$(printf '%s\n' 2026.4 "$version" | sort -V | head -n 1)" == 2026.4 ]] || clusters=''
  for tool in memcheck racecheck synccheck initcheck; do
    echo "compute-sanitizer $tool"
    for test in decode evict verify serving append paged_kv prefill fetch bf16_history query_offsets; do
      local left_out=''
      if [[ "$tool $test" == 'racecheck bf16_history' && -z "$clusters" ]]; then
        left_out='-*DecodeOf*'
      elif [[ "$tool $test" == 'racecheck decode' && -z "$clusters" ]]; then
        left_out='-*/clusters:*/auto'  # kAuto takes clusters, too
        echo "decode, bf16_history: clusters left out of racecheck, which needs compute-sanitizer 2026.4 for them;" \
          "this is $version"
      fi
      attempt "$tool $test" 120 compute-sanitizer --tool "$tool" --error-exitcode 9 \
        "$programs/tests/kernels_cuda_${test}_test" --gtest_filter="$filter$left_out" \
        >"$output/$tool.$test.log" 2>&1
      echo "$test: $(grep -E 'SUMMARY|ERROR' "$output/$tool.$test.log" | tail -n 1)"
    done
  done
}
[[ -n "$quick" ]] || sanitize

echo "logs: $output"
if [[ ${#failed[@]} -gt 0 ]]; then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
echo "everything passed"
