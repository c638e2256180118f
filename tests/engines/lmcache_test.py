#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""The serde for LMCache, with the real package: lmcache_test.py --build DIR

Needs build/lmcache (tests/engines/install_lmcache.sh); exit code 77 without it.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
PYTHON = ROOT / "build/lmcache/venv/bin/python"
SKIPPED = 77
SECONDS = 600


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    options = parser.parse_args()
    if not (ROOT / "build/lmcache/pinned").exists():
        print("skipped: LMCache is not installed; tests/engines/install_lmcache.sh installs it")
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, ROOT / "python/tools/develop.py", "--build", options.build,
                        "--to", folder], check=True)
        environment = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run([PYTHON, ROOT / "python/tests/lmcache_serde_test.py"], check=False,
                              env=environment, timeout=SECONDS, stderr=subprocess.PIPE, text=True)
        sys.stderr.write(done.stderr)
        program = subprocess.run([PYTHON, "-m", "crumb.lmcache", "--help"], check=False,
                                 env=environment, timeout=SECONDS, stdout=subprocess.DEVNULL)
    return 1 if done.returncode or program.returncode or "skipped" in done.stderr else 0


if __name__ == "__main__":
    sys.exit(main())
