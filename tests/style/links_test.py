#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Checks the libraries that programs are linked with: links_test.py portable|no-cuda PROGRAM...

portable: the C library alone, so that they run on any machine with a driver as they are.
no-cuda: neither a library nor a function of CUDA."""

import re
import subprocess
import sys

C_LIBRARY = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1",
             "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


def output_of(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def needed(program):
    return set(re.findall(r"NEEDED.*\[(.+?)\]", output_of("readelf", "-d", program)))


def complaints(rule, program):
    libraries = needed(program)
    if not libraries:
        return [f"{program} names no library at all: is it a program?"]
    if rule == "portable":
        return [f"{program} needs {name}" for name in sorted(libraries - C_LIBRARY)]
    found = [f"{program} needs {name}" for name in sorted(libraries)
            if re.match(r"lib(cuda|cudart|cublas|nvidia)", name)]
    functions = re.findall(r" (cu(?:da)?[A-Z]\w+)$", output_of("nm", program), re.MULTILINE)
    return found + [f"{program} has {name}" for name in functions[:5]]


def main():
    rule, programs = sys.argv[1], sys.argv[2:]
    if rule not in ("portable", "no-cuda") or not programs:
        sys.exit(__doc__)
    found = [line for program in programs for line in complaints(rule, program)]
    print("\n".join(found) or f"{len(programs)} programs: {rule}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
