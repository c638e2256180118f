#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# From a bare Debian 12 machine to a served model: installs what is missing, builds, and runs the
# demo, which starts a crumbd and three workers in a temporary folder and stops all of them.
#   deploy/quickstart.sh            the demo
#   deploy/quickstart.sh --wheel    instead of it, the Python wheel with the server inside
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
  "") targets=(crumbd crumb crumb-tiny-lm) ;;
  --wheel) targets=(crumbd crumb crumb_c) ;;
  -h|--help) sed -n '4,7s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
  *) echo "quickstart.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
esac

step() { printf '\n== %s (%ss)\n' "$1" "$SECONDS"; }

step "packages"
bash deploy/install_packages.sh

step "build"
mkdir -p build
cmake --preset release >build/configure.log 2>&1 || { tail -n 30 build/configure.log >&2; exit 1; }
cmake --build --preset release --target "${targets[@]}"

if [[ "${1:-}" == --wheel ]]; then
  step "wheel"
  wheel=$(bash deploy/build_wheel.sh)
  step "done"
  echo "pip install $wheel"
  exit 0
fi

step "demo"
python3 deploy/demo.py --bin build/release/bin --model models/data/tiny-lm
step "done"
