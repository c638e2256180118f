#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Checks who includes whom: the arrows between folders, and that third parties stay in their place.

Reads #include lines and the link lines of CMakeLists.txt under a root (default: the project).
Exit code 1 and one line per offence.
"""

import pathlib
import re
import sys

ARROWS = {
    "proto": set(),
    "common": set(),
    "kernels": set(),
    "models": {"kernels", "common"},
    "calibration": {"kernels", "common"},
    "storage": {"common"},
    "transport": {"common"},
    "server": {"storage", "transport", "proto", "common"},
    "client": {"proto", "kernels", "common"},
    "client/examples": {"client", "models", "calibration", "kernels", "proto", "common"},
    "tools": {"client", "storage", "transport", "models", "calibration", "kernels", "proto",
              "common"},
    "bench": {"tools", "client/examples", "client", "storage", "transport", "models", "calibration",
              "kernels", "proto", "common"},
}

# The rooms of a folder: which of its subfolders may include which. Their subfolders belong to them.
ROOMS = {
    "client/api": set(),
    "client/rpc": {"client/api"},
    "client/worker": {"client/api"},
    "client/cpu": {"client/worker", "client/api"},
    "client/gpu": {"client/cpu", "client/worker", "client/rpc", "client/api"},
    "client/transfer": {"client/gpu", "client/cpu", "client/worker", "client/api"},
    "client/c_api": {"client/api"},
}

# Header prefixes of third parties and the only places that may see them (tests see all).
CONFINED = {
    "rocksdb/": ("storage/ssd/",),
    "ucp/": ("transport/",),
    "uct/": ("transport/",),
    "cuda": ("kernels/cuda/", "models/cuda/", "client/", "bench/decode/", "bench/device/",
             "bench/kernels/", "bench/quality_cuda/"),
    "cublas": ("models/cuda/",),
    "grpc": ("server/", "client/"),
    "prometheus/": ("server/metrics/",),
    "httplib.h": ("server/admin/", "tools/", "bench/"),
    "yaml-cpp/": ("common/config.cc",),
    "spdlog/": ("common/logging.cc",),
    "openssl/": ("common/sha256.cc", "common/tls_files.cc", "storage/ssd/page_cipher.cc"),
    "server/cluster/etcd/": ("server/cluster/",),
}

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
LINK = re.compile(r"crumb::([a-z0-9_]+)")
SOURCES = {".h", ".cc", ".cu", ".cuh"}


def folder_of(path):
    """The folder that owns a path, the longest name of ARROWS that it starts with."""
    owners = [f for f in ARROWS if path == f or path.startswith(f + "/")]
    return max(owners, key=len) if owners else None


def included_folder(header):
    if header.startswith("crumb/v1/"):
        return "proto"
    if header.startswith("crumb/"):
        return "client"
    return folder_of(header)


def room_of(path):
    """The room of ROOMS that a path or a header lies in, or None."""
    if path.startswith("crumb/") and not path.startswith("crumb/v1/"):
        return "client/api"
    return next((room for room in ROOMS if path.startswith(room + "/")), None)


def check_file(path, text):
    """Yields what is wrong with one file; `path` is relative to the root."""
    owner = folder_of(path)
    if owner is None:
        return
    if path.endswith("CMakeLists.txt"):
        targets = {t.split("_")[0] if folder_of(t) is None else t for t in LINK.findall(text)}
        used = {folder_of(t) for t in targets} - {None}
    else:
        headers = INCLUDE.findall(text)
        used = {included_folder(h) for h in headers} - {None}
        room = room_of(path)
        rooms = {room_of(h) for h in headers} - {room, None} if room else set()
        for other in sorted(rooms - ROOMS.get(room, set())):
            yield f"{path}: {room} may not know {other}"
        for header in headers:
            for prefix, places in CONFINED.items():
                if header.startswith(prefix) and not path.startswith(places):
                    yield f"{path}: includes <{header}>, which only {', '.join(places)} may"
    for folder in sorted(used - ARROWS[owner] - {owner}):
        yield f"{path}: {owner} may not know {folder}"


def find_cycle(arrows):
    """A cycle among the allowed arrows, or None: the table itself must have none."""
    state = {}

    def visit(node, trail):
        if state.get(node) == "done":
            return None
        if node in trail:
            return trail[trail.index(node):] + [node]
        for target in sorted(arrows.get(node, ())):
            found = visit(target, trail + [node])
            if found:
                return found
        state[node] = "done"
        return None

    for start in sorted(arrows):
        found = visit(start, [])
        if found:
            return found
    return None


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else
                        pathlib.Path(__file__).resolve().parents[2])
    offences = []
    cycle = find_cycle(ARROWS) or find_cycle(ROOMS)
    if cycle:
        offences.append("the allowed arrows form a cycle: " + " -> ".join(cycle))
    files = 0
    for folder in sorted({f.split("/")[0] for f in ARROWS}):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SOURCES or path.name == "CMakeLists.txt":
                files += 1
                relative = path.relative_to(root).as_posix()
                offences += check_file(relative, path.read_text(encoding="utf-8"))
    print("\n".join(offences) if offences else f"arrows: {files} files")
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
