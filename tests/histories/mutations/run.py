#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Puts faults back into the code, one at a time, and counts the histories that find each.

Every *.patch beside this file is a fault that the code once had, or that a reader of it could make. The
script applies each patch to a worktree of HEAD, builds crumb-histories there, and runs it until a rule is
broken. It prints one row of the table in ../README.md for each patch, and ends with exit code 1 if a fault
was not found. Without a patch the same histories must break no rule: that is the test `histories` of CI.

`--check` only tests that the patches still apply.
"""
import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
SOURCES = HERE.parents[2]
NO_CHECKOUT = 77  # exit code for a test that was skipped


def run(command, cwd, check=True):
    done = subprocess.run(command, cwd=cwd, text=True, capture_output=True)
    if check and done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done


def check(patches):
    """Returns 0 if every patch applies to the sources as they are."""
    if run(["git", "rev-parse", "--is-inside-work-tree"], SOURCES, check=False).returncode != 0:
        print("the sources are no git checkout: nothing is checked")
        return NO_CHECKOUT
    stale = [p.name for p in patches
             if run(["git", "apply", "--check", str(p)], SOURCES, check=False).returncode != 0]
    for name in stale:
        print(f"tests/histories/mutations/{name} does not apply any more: adapt it to the code")
    print(f"{len(patches) - len(stale)} of {len(patches)} patches apply")
    return 1 if stale else 0


def find(tree, build, patch, options):
    """Returns the number of histories until a rule breaks, and the rule; None if none breaks."""
    run(["git", "apply", str(patch)], tree)
    try:
        run(["ninja", "-C", str(build), f"-j{options.jobs}", "crumb-histories"], tree)
        done = run([str(build / "tests/crumb-histories"), "--histories", str(options.histories),
                    "--jobs", "1", "--shrink-runs", "0"], tree, check=False)
    finally:
        run(["git", "apply", "-R", str(patch)], tree)
    broken = re.search(r"^seed (\d+), .* break ([a-z-]+):", done.stdout, re.M)
    return (int(broken.group(1)), broken.group(2)) if broken else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only test that the patches apply")
    parser.add_argument("--histories", type=int, default=20000, help="at most for each patch")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="of the compiler")
    parser.add_argument("patches", nargs="*", help="names of patches; none: all of them")
    options = parser.parse_args()
    patches = [p for p in sorted(HERE.glob("*.patch"))
               if not options.patches or p.stem in options.patches]
    if options.check:
        return check(patches)
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder) / "crumb"
        run(["git", "worktree", "add", "--detach", str(tree), "HEAD"], SOURCES)
        try:
            build = tree / "build/release"
            run(["cmake", "--preset", "release", "-DCRUMB_CUDA=OFF"], tree)
            for patch in patches:
                found = find(tree, build, patch, options)
                missed += found is None
                result = f"{found[0]} | `{found[1]}`" if found else f"not in {options.histories} |"
                print(f"| `{patch.stem}` | {result} |", flush=True)
        finally:
            run(["git", "worktree", "remove", "--force", str(tree)], SOURCES)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
