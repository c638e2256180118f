# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Searches all states of a Promela model with Spin: spin -a, a C compiler, pan.

Fails if the search ends early, visits fewer states than --states-min, or finds something
unexpected: expected is no error, or with --finds TEXT an error whose message has TEXT. With --finds the
steps that lead to the error are printed.
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

# Bounds of one search. A search that reaches one of them fails.
DEPTH_MAX = 1_000_000
MEMORY_MIB_MAX = 4096
SECONDS_MAX = 600
TRAIL_LINES_MAX = 60
# The exit code that ctest counts as a skipped test.
SKIPPED = 77


def run(command, folder, seconds):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds)
    return done.returncode, done.stdout + done.stderr


def number_before(text, output):
    found = re.search(r"([0-9.e+]+) " + text, output)
    return int(float(found.group(1))) if found else None


def build(model, defines, liveness, folder):
    code, output = run(["spin", "-a", *defines, str(model)], folder, SECONDS_MAX)
    if code != 0 or not (folder / "pan.c").exists():
        sys.exit(f"spin -a failed:\n{output}")
    how = ["-DNFAIR=3"] if liveness else ["-DSAFETY"]
    # Optimising pan.c takes the compiler longer (25 s against 3) than it saves the search (12 s
    # against 22 for the largest one).
    code, output = run(
        ["gcc", "-O0", "-w", "-DCOLLAPSE", "-DVECTORSZ=1024", f"-DMEMLIM={MEMORY_MIB_MAX}", *how,
         "-o", "pan", "pan.c"], folder, SECONDS_MAX)
    if code != 0:
        sys.exit(f"the compiler failed:\n{output}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--define", action="append", default=[], metavar="NAME[=VALUE]")
    parser.add_argument("--liveness", action="store_true", help="the LTL property, weakly fair")
    parser.add_argument("--finds", metavar="TEXT", help="the error that the search has to find")
    parser.add_argument("--states-min", type=int, default=1)
    options = parser.parse_args()
    if shutil.which("spin") is None:
        print("spin is not installed: deploy/install_packages.sh --tests installs it")
        sys.exit(SKIPPED)
    defines = [f"-D{name}" for name in options.define]
    if options.liveness:
        defines.append("-DLIVENESS")
    with tempfile.TemporaryDirectory(prefix="crumb-model-") as name:
        folder = pathlib.Path(name)
        build(options.model.resolve(), defines, options.liveness, folder)
        how = ["-a", "-f"] if options.liveness else []
        try:
            _, output = run(["./pan", f"-m{DEPTH_MAX}", *how], folder, SECONDS_MAX)
        except subprocess.TimeoutExpired:
            sys.exit(f"the search did not end within {SECONDS_MAX} s: choose smaller sizes")
        states = number_before("states, stored", output)
        errors = re.search(r"errors: (\d+)", output)
        if states is None or errors is None:
            sys.exit(f"pan printed no result:\n{output}")
        print(f"{options.model.name} {' '.join(options.define)}: {states} states, "
              f"{errors.group(1)} errors")
        found = re.search(r"pan:1: (.*)", output)
        error = found.group(1) if found else ""
        truncated = re.search(r"max search depth too small|out of memory|search was truncated|"
                              r"reached -DMEMLIM|Search not completed", output)
        if options.finds is None:
            if errors.group(1) != "0" or error:
                _, trail = run(["spin", "-t", "-p", *defines, str(options.model.resolve())], folder,
                               SECONDS_MAX)
                sys.exit(f"the model has an error: {error}\n{trail}")
            if truncated:
                sys.exit(f"the search is not complete: {truncated.group(0)}")
            if states < options.states_min:
                sys.exit(f"{states} states are suspiciously few; expected {options.states_min}")
            return
        if options.finds not in error:
            sys.exit(f"the search should have found '{options.finds}', and found '{error}'")
        print(f"found: {error[:200]}")
        trails = list(folder.glob("*.trail"))
        if trails:
            (folder / (options.model.name + ".trail")).write_bytes(trails[0].read_bytes())
            _, trail = run(["spin", "-t", "-p", "-k", trails[0].name, *defines,
                            str(options.model.resolve())], folder, SECONDS_MAX)
            steps = [line for line in trail.splitlines() if "proc" in line]
            print("\n".join(steps[-TRAIL_LINES_MAX:]))


if __name__ == "__main__":
    main()
