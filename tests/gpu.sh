#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# Everything that needs a GPU in one call, on a machine with one: builds for its architecture, runs
# the checks over all GPUs and cores, then the timings by themselves, then compute-sanitizer where
# it is installed. Prints the failures at the end. Sees the GPUs that CUDA_VISIBLE_DEVICES names, or all.
#   tests/gpu.sh [--programs DIR] [--output DIR] [--commit NAME] [--only SECTION,SECTION...]
# --programs DIR  take DIR/bin, DIR/lib and DIR/tests, built before; nothing is built
# --output DIR    for logs and timings; without it, a new temporary folder
# --commit NAME   write the timings as JSON under this name: bench/results has such files
# --only LIST     of checks, timings, sanitizers
set -uo pipefail

programs='' output='' timings=() only=()
while [[ $# -gt 0 ]]; do
  case "$1" in
    --programs) programs=$(realpath -m "${2:?--programs needs a folder}"); shift 2 ;;
    --output) output=$(realpath -m "${2:?--output needs a folder}"); shift 2 ;;
    --commit) timings=(--commit "${2:?--commit needs a name}"); shift 2 ;;
    --only) only=(--only "${2:?--only needs sections}"); shift 2 ;;
    -h|--help) sed -n '4,11s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "gpu.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
  esac
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."

chosen=()
[[ -z "${CUDA_VISIBLE_DEVICES:-}" ]] || chosen=(--id="$CUDA_VISIBLE_DEVICES")
devices=$(nvidia-smi "${chosen[@]}" --query-gpu=index,compute_cap,memory.total,name,driver_version \
  --format=csv,noheader,nounits 2>/dev/null)
if [[ $? -ne 0 || -z "$devices" ]]; then
  echo "gpu.sh: nvidia-smi shows no GPU: run this on a machine with an NVIDIA GPU and its driver" >&2
  exit 1
fi
echo "$devices"
column() { cut -d, -f"$1" <<<"$devices" | tr -d ' '; }
capability=$(column 2 | head -n 1)

if [[ -z "$programs" ]]; then
  if [[ -z "${CUDACXX:-}" ]] && ! command -v nvcc >/dev/null; then
    echo "gpu.sh: no nvcc: install the CUDA toolkit and put it on PATH, or name programs that were" \
      "built elsewhere with --programs DIR" >&2
    exit 1
  fi
  programs=build/gpu
  # 9.0 becomes 90a: Hopper's kernels use instructions that only this architecture has.
  architecture=${capability//./}
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

# A process takes up to 2 GiB of its GPU.
memory=$(column 3 | sort -n | head -n 1)
processes=$((memory / 2048 > 16 ? 16 : memory < 4096 ? 1 : memory / 2048))
exec python3 tests/gpu_programs.py --programs "$programs" --output "${output:-$(mktemp -d)}" \
  --gpus "${CUDA_VISIBLE_DEVICES:-$(column 1 | paste -s -d,)}" --capability "$capability" \
  --per-gpu "$processes" "${timings[@]}" "${only[@]}"
