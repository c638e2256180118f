#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# Installs LMCache for tests/engines/lmcache_test.py, from PyPI, into build/lmcache: about 4 GB.
#   tests/engines/install_lmcache.sh [--python PYTHON]
# Does nothing if it is installed already. The project's own package is added by the test.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=python3
while [[ $# -gt 0 ]]; do
  case "$1" in
    --python) python=${2:?--python needs a program}; shift 2 ;;
    -h|--help) sed -n '4,6s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "install_lmcache.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
  esac
done

lmcache=lmcache==0.5.6
torch=torch==2.13.0
venv=build/lmcache/venv
pinned="$lmcache $torch"
if [[ "$(cat build/lmcache/pinned 2>/dev/null)" == "$pinned" ]]; then
  echo "$venv has $pinned"
  exit 0
fi

rm -rf build/lmcache
mkdir -p build/lmcache
"$python" -m venv "$venv"
"$venv/bin/pip" --disable-pip-version-check -q install uv
uv="$venv/bin/uv pip install -q --compile-bytecode --python $venv/bin/python"
# These are the packages that LMCache imports for its serdes and its program, without those for GPUs
# and remote stores.
$uv "$torch" aiofile aiofiles aiohttp blake3 cachetools cryptography fastapi httptools httpx \
  msgspec numba "numpy<=2.2.6" "opentelemetry-api<=1.40.0" "opentelemetry-sdk<=1.40.0" \
  "opentelemetry-exporter-prometheus<=0.61b0" "prometheus_client<=0.24.1" psutil py-cpuinfo pyyaml \
  "pyzmq>=25" requests safetensors sortedcontainers "transformers>=5.4" uvicorn
$uv --no-deps "$lmcache"
echo "$pinned" >build/lmcache/pinned
echo "$venv has $pinned"
