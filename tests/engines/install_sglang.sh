#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# Installs SGLang for tests/engines/sglang_test.py, from PyPI, into build/sglang: about 5 GB.
#   tests/engines/install_sglang.sh [--python PYTHON]
# SGLang needs Python 3.11 or later. Its kernels exist for GPUs and for CPUs with AMX only: a package
# sgl_kernel without kernels is installed instead, which suffices for the attention back end
# torch_native. Does nothing if it is installed already. The project's own package is added by the
# tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=python3
while [[ $# -gt 0 ]]; do
  case "$1" in
    --python) python=${2:?--python needs a program}; shift 2 ;;
    -h|--help) sed -n '4,9s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "install_sglang.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
  esac
done

sglang=sglang==0.5.23
# SGLang requires torch 2.14.1, but it runs with 2.13.0, which the other engines here have.
torch="torch==2.13.0 torchvision==0.28.0"
venv=build/sglang/venv
pinned="$sglang $torch"
if [[ "$(cat build/sglang/pinned 2>/dev/null)" == "$pinned" ]]; then
  echo "$venv has $pinned"
  exit 0
fi

rm -rf build/sglang
mkdir -p build/sglang
"$python" -m venv "$venv"
pip="$venv/bin/pip --disable-pip-version-check -q"
$pip install uv
uv="$venv/bin/uv pip install -q --compile-bytecode --python $venv/bin/python"
$pip download --no-deps -d build/sglang/wheels "$sglang"
# The requirements of SGLang, without packages that exist for GPUs or for other machines only, and
# without those that serving text on a CPU does not import.
"$venv/bin/python" - >build/sglang/requirements.txt <<'PY'
import glob
import re
import zipfile

LEFT_OUT = ("torch|torchaudio|torchcodec|torchvision|torch_memory_saver|av|decord2|cuda-python|"
            "flash-attn-4|flashinfer_python|humming-kernels|nvidia-[a-z-]*|nvshmem4py-cu13|"
            "quack-kernels|sgl-[a-z-]*|sglang-kernel|tilelang|datasets|modelscope|timm|kernels|"
            "soundfile|py-spy|smg-grpc-servicer|deepseek-recipe|tml-renderers|blobfile|scipy|numba|"
            "anthropic|build")
wheel = zipfile.ZipFile(glob.glob("build/sglang/wheels/sglang*.whl")[0])
name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
for line in wheel.read(name).decode().splitlines():
    found = re.match(r"Requires-Dist: (.*)", line)
    if found and "extra ==" not in line and not re.match(rf"({LEFT_OUT})(?![\w-])", found[1]):
        print(found[1])
PY
# shellcheck disable=SC2086 # several packages
$uv -r build/sglang/requirements.txt $torch dill
$uv --no-deps build/sglang/wheels/sglang*.whl
rm -rf build/sglang/wheels
stub="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sgl_kernel"
mkdir "$stub"
cat >"$stub/__init__.py" <<'PY'
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **named):
        raise NotImplementedError(f"sgl_kernel.{name}: this machine has no kernels of SGLang")

    return missing
PY
echo "$pinned" >build/sglang/pinned
echo "$venv has $pinned"
