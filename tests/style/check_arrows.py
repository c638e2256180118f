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
    "kernels": {"common"},
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

# Folders that may include only these headers of one that they may know.
ONLY = {
    ("kernels", "common"): {"common/page_format.h"},
}

# The rooms of a folder: which of its subfolders may include which. A file belongs to the room with
# the longest name that it lies in, which can be the folder itself; a folder with rooms has no files
# outside them.
ROOMS = {
    "client/api": set(),
    "client/rpc": {"client/api"},
    "client/worker": {"client/api"},
    "client/cpu": {"client/worker", "client/api"},
    "client/gpu": {"client/cpu", "client/worker", "client/rpc", "client/api"},
    "client/transfer": {"client/gpu", "client/cpu", "client/worker", "client/api"},
    "client/c_api": {"client/api"},
    "kernels": set(),
    "kernels/cpu": {"kernels"},
    "kernels/reference": {"kernels"},
    "kernels/cuda": {"kernels"},
    "kernels/cuda/common": {"kernels"},
    "kernels/cuda/decode": {"kernels", "kernels/cuda/common"},
    "kernels/cuda/evict": {"kernels", "kernels/cuda/common"},
    "kernels/cuda/prefill": {"kernels", "kernels/cuda/common", "kernels/cuda/decode"},
    "kernels/cuda/pages": {"kernels", "kernels/cuda/common", "kernels/cuda/decode",
                           "kernels/cuda/evict"},
    "storage/policy": set(),
    "storage": {"storage/policy"},
    "storage/index": {"storage", "storage/policy"},
    "storage/host": {"storage", "storage/policy", "storage/index"},
    "storage/device": {"storage", "storage/policy", "storage/index"},
    "storage/ssd": {"storage", "storage/policy", "storage/index"},
    "storage/store": {"storage", "storage/host", "storage/device", "storage/ssd"},
    "server/base": set(),
    "server/metrics": set(),
    "server/tenants": set(),
    "server/keyspaces": {"server/base", "server/metrics"},
    "server/events": {"server/base", "server/keyspaces", "server/metrics"},
    "server/session": {"server/base", "server/metrics", "server/tenants", "server/events"},
    "server/device": {"server/base", "server/metrics", "server/session"},
    "server/cluster/etcd": {"server/base"},
    "server/cluster": {"server/base", "server/cluster/etcd", "server/keyspaces"},
    "server/calls": {"server/base", "server/metrics", "server/tenants", "server/keyspaces",
                     "server/events", "server/session", "server/device", "server/cluster"},
    "server/service": {"server/base", "server/metrics", "server/session", "server/cluster",
                       "server/calls"},
    "server/admin": {"server/base", "server/metrics", "server/tenants", "server/events",
                     "server/session", "server/cluster"},
    "server/daemon": {"server/base", "server/tenants", "server/keyspaces", "server/events",
                      "server/session", "server/device", "server/cluster", "server/calls",
                      "server/service", "server/admin"},
    "bench/quality_methods": set(),
    "bench/quality_cuda": {"bench/quality_methods"},
    "bench": {"bench/quality_methods", "bench/quality_cuda"},
    "bench/kernels": {"bench"},
    "bench/decode": {"bench", "bench/kernels"},
    "bench/device": {"bench"},
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
    "prometheus/": ("server/admin/",),
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
    rooms = [room for room in ROOMS if path.startswith(room + "/")]
    return max(rooms, key=len) if rooms else None


def check_file(path, text):
    """Yields the offences of one file; `path` is relative to the root."""
    owner = folder_of(path)
    if owner is None:
        return
    if path.endswith("CMakeLists.txt"):
        targets = {t.split("_")[0] if folder_of(t) is None else t for t in LINK.findall(text)}
        used = {folder_of(t) for t in targets} - {None}
        used_headers_only = {whom for who, whom in ONLY if who == owner}
        for folder in sorted(used & used_headers_only):
            yield f"{path}: {owner} may include headers of {folder}, but not link it"
    else:
        headers = INCLUDE.findall(text)
        used = {included_folder(h) for h in headers} - {None}
        room = room_of(path)
        if room is None and any(other.startswith(owner + "/") for other in ROOMS):
            yield f"{path}: {owner} has rooms, and the file lies in none"
        rooms = {room_of(h) for h in headers if included_folder(h) == owner} - {room, None}
        for other in sorted(rooms - ROOMS.get(room, set())):
            yield f"{path}: {room} may not know {other}"
        for header in headers:
            only = ONLY.get((owner, included_folder(header)))
            if only is not None and header not in only:
                yield f"{path}: {owner} may include only {', '.join(sorted(only))}, not {header}"
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
