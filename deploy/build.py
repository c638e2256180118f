#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Configures and builds Crumb, and shows how much of the build is left.

  python3 deploy/build.py [--preset NAME] [--cuda] [--target NAME...]

CUDA code takes most of the time of a build. It is built if nvidia-smi finds a GPU and there is an
nvcc, for the architecture of that GPU; or if --cuda requests it, without a GPU for all
architectures of cmake/CrumbCuda.cmake. Presets other than release and dev decide by themselves.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Presets whose CUDA back end is chosen here; CMakePresets.json decides for the others.
CUDA_PRESETS = ("release", "dev")
# Seconds between two lines of progress if the output is no terminal.
LOG_PERIOD = 30
STATUS = re.compile(r"^@(\d+)/(\d+)@ (.*)$")


def gpu_architectures():
    """The CMake architectures of the GPUs that nvidia-smi finds, such as 80-real."""
    try:
        found = subprocess.run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
                               capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    capabilities = sorted({line.strip().replace(".", "") for line in found.splitlines()
                           if re.fullmatch(r"\s*\d+\.\d+\s*", line)})
    # The kernels for Hopper use instructions that only the architecture 90a has.
    return [("90a" if capability == "90" else capability) + "-real" for capability in capabilities]


def cuda_options(preset, requested, architectures, has_nvcc):
    """The options of CMake that choose the CUDA back end, and a line that explains the choice."""
    if preset not in CUDA_PRESETS:
        if requested:
            raise ValueError(f"--cuda needs one of the presets {', '.join(CUDA_PRESETS)}")
        return [], f"CUDA: as the preset {preset} sets it"
    chosen = f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(architectures)}"
    if requested and not has_nvcc:
        raise ValueError("--cuda needs an nvcc: install the CUDA toolkit and put nvcc on PATH, "
                         "or set CUDACXX")
    if requested and not architectures:
        return ["-DCRUMB_CUDA=ON"], "CUDA: built for all architectures, as --cuda requests"
    if architectures and has_nvcc:
        return (["-DCRUMB_CUDA=ON", chosen],
                f"CUDA: built for the GPU of this machine ({', '.join(architectures)})")
    why = "there is a GPU, but no nvcc on PATH" if architectures else "nvidia-smi finds no GPU"
    return ["-DCRUMB_CUDA=OFF"], f"CUDA: not built, because {why}; --cuda builds it anyway"


def progress_text(finished, total, seconds):
    """A line such as 'build: 120 of 480 steps, about 4:30 left'."""
    line = f"build: {finished} of {total} steps"
    if finished == total:
        return f"{line}, {int(seconds) // 60}:{int(seconds) % 60:02} min"
    left = int(seconds / max(finished, 1) * (total - finished))
    return f"{line}, about {left // 60}:{left % 60:02} min left"


def follow(lines, out, terminal, clock=time.monotonic):
    """Replaces the status lines of Ninja by lines of progress, and passes other lines on."""
    begin = shown = clock()
    for line in lines:
        status = STATUS.match(line)
        if status is None:
            print(("\r\033[K" if terminal else "") + line.rstrip("\n"), file=out, flush=True)
            continue
        finished, total = int(status[1]), int(status[2])
        now = clock()
        if terminal:
            print("\r\033[K" + progress_text(finished, total, now - begin), end="", file=out,
                  flush=True)
        elif now - shown >= LOG_PERIOD or finished == total:
            shown = now
            print(progress_text(finished, total, now - begin), file=out, flush=True)
    if terminal:
        print(file=out, flush=True)


def configure(preset, options):
    """Runs CMake; prints the end of its output and ends the program if it fails."""
    done = subprocess.run(["cmake", "--preset", preset, *options], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        sys.exit("\n".join(done.stdout.splitlines()[-30:]))


def build(preset, targets):
    """Runs the build; returns its exit code."""
    command = ["cmake", "--build", "--preset", preset]
    if targets:
        command += ["--target", *targets]
    environment = dict(os.environ, NINJA_STATUS="@%f/%t@ ")
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT) as process:
        follow(process.stdout, sys.stdout, sys.stdout.isatty())
    return process.returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--preset", default="release", help="preset of CMakePresets.json")
    parser.add_argument("--cuda", action="store_true",
                        help="build CUDA code even if there is no GPU")
    parser.add_argument("--target", nargs="*", default=[], help="targets; default: everything")
    arguments = parser.parse_args()
    has_nvcc = bool(os.environ.get("CUDACXX")) or shutil.which("nvcc") is not None
    try:
        options, explanation = cuda_options(arguments.preset, arguments.cuda, gpu_architectures(),
                                            has_nvcc)
    except ValueError as error:
        sys.exit(f"build.py: {error}")
    print(f"build: preset {arguments.preset}")
    print(explanation, flush=True)
    configure(arguments.preset, options)
    return build(arguments.preset, arguments.target)


if __name__ == "__main__":
    sys.exit(main())
