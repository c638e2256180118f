# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Fields of results that identify a run: command, commit, machine and versions.

For the benchmarks in Python; `crumb-bench` and the programs for GPUs write these fields themselves.
"""

import hashlib
import json
import os
import pathlib
import platform
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def gpu():
    """Name and driver of the first GPU, "NVIDIA H200, driver 580.159.04"; empty without one."""
    try:
        lines = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version",
                                "--format=csv,noheader"], capture_output=True, text=True,
                               check=False).stdout.splitlines()
    except OSError:
        return ""
    return ", driver ".join(lines[0].rsplit(", ", 1)) if lines else ""


def cpu():
    """The model of the CPU and how many of its cores this process may use: "AMD EPYC, 2 cores"."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = found[1].strip() if found else platform.processor() or platform.machine()
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def commit():
    """The commit of this tree, with "-dirty" if it has changes; empty outside a checkout."""
    try:
        return subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True,
                              text=True, cwd=ROOT, check=False).stdout.strip()
    except OSError:
        return ""


def versions(names, python=sys.executable):
    """{name: version} of those distributions that an interpreter has."""
    program = ("import importlib.metadata as m, json, sys\n"
               "def version(name):\n"
               "    try:\n"
               "        return m.version(name)\n"
               "    except m.PackageNotFoundError:\n"
               "        return None\n"
               "found = {name: version(name) for name in sys.argv[1:]}\n"
               "print(json.dumps({name: v for name, v in found.items() if v}))")
    return json.loads(subprocess.run([python, "-c", program, *names], capture_output=True,
                                     text=True, check=True).stdout)


def weights_digest(model):
    """SHA-256 of the weights in a model's folder."""
    return hashlib.sha256((pathlib.Path(model) / "model.safetensors").read_bytes()).hexdigest()


def of_run(device, names=(), *, commit_name="", python=sys.executable):
    """The fields with which a result begins; taken before the run changes files.

    device: "cuda" or "cpu". names: distributions whose versions are fields, too. commit_name: for
    copies of the tree that are no checkout. python: the interpreter that has the distributions.
    """
    return {"command": " ".join(sys.argv), "commit": commit_name or commit(),
            "machine": gpu() if device == "cuda" else cpu(), **versions(names, python)}
