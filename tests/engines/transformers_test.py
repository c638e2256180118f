#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""The package's tests that need torch and transformers, in the engines' environment, which has
both: transformers_test.py --build DIR

Needs build/engines (tests/engines/install.sh); exit code 77 without it.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
PYTHON = ROOT / "build/engines/venv/bin/python"
TESTS = ("ops_test", "calibrate_test", "gpu_calls_test", "import_gguf_test", "long_context_test",
         "transformers_cache_test", "transformers_device_test", "transformers_generate_test")
SKIPPED = 77


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=pathlib.Path, required=True)
    options = parser.parse_args()
    if not PYTHON.exists():
        print(f"Skipped: no {PYTHON}; tests/engines/install.sh makes it")
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, ROOT / "python/tools/develop.py", "--build", options.build,
                        "--to", folder], check=True)
        environment = {**os.environ, "PYTHONPATH": folder, "HF_HUB_OFFLINE": "1"}
        failed = [name for name in TESTS if subprocess.run(
            [PYTHON, ROOT / f"python/tests/{name}.py"], env=environment, check=False).returncode]
    print("failed:", failed or "none")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
