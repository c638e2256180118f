#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# Installs missing packages, builds everything, runs all tests and ends with their counts. CUDA code
# is built if nvidia-smi finds a GPU, for that GPU, or with --cuda.
#   tests/run.sh [--preset NAME] [--cuda] [-- ctest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

preset=release cuda=()
while [[ $# -gt 0 ]]; do
  case "$1" in
    --preset) preset=${2:?--preset needs a name}; shift 2 ;;
    --cuda) cuda=(--cuda); shift ;;
    --) shift; break ;;
    -h|--help) sed -n '4,7s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "run.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
  esac
done

bash deploy/install_packages.sh --tests
python3 deploy/build.py --preset "$preset" "${cuda[@]}"

output=$(mktemp)
trap 'rm -f "$output"' EXIT
code=0
ctest --preset "$preset" --no-tests=error "$@" 2>&1 | tee "$output" || code=$?

# "97% tests passed, 2 tests failed out of 70"
read -r failed total < <(sed -nE 's/.* ([0-9]+) tests? failed out of ([0-9]+).*/\1 \2/p' "$output")
skipped=$(grep -cE '\*\*\*Skipped' "$output" || true)
echo "$((${total:-0} - ${failed:-0} - skipped)) passed, ${failed:-0} failed, $skipped skipped"
exit "$code"
