#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# From a bare Debian 12 machine to a served model: installs missing packages, builds, and runs the
# demo, which starts a crumbd and three workers in a temporary folder and stops all of them. With
# --wheel it makes the Python wheel, which contains the server, instead. CUDA code is built if
# nvidia-smi finds a GPU, for that GPU, or with --cuda; the demo does not need it.
#   deploy/quickstart.sh [--wheel] [--cuda]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

targets=(crumbd crumb crumb-tiny-lm) product=demo cuda=()
while [[ $# -gt 0 ]]; do
  case "$1" in
    --wheel) targets=(crumbd crumb crumb_c) product=wheel; shift ;;
    --cuda) cuda=(--cuda); shift ;;
    -h|--help) sed -n '4,8s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "quickstart.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
  esac
done

step() { printf '\n== step %s of 3: %s (%ss so far)\n' "$1" "$2" "$SECONDS"; }

step 1 "packages"
bash deploy/install_packages.sh

step 2 "build"
python3 deploy/build.py "${cuda[@]}" --target "${targets[@]}"

step 3 "$product"
if [[ "$product" == wheel ]]; then
  wheel=$(bash deploy/build_wheel.sh)
  echo "pip install $wheel"
else
  python3 deploy/demo.py --bin build/release/bin --model models/data/tiny-lm
fi
printf '\n== done in %ss\n' "$SECONDS"
