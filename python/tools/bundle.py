#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Copies built files into a package folder: bundle.py --build DIR --headers DIR --to DIR

The folder gets bin/crumbd, bin/crumb, lib/libcrumb.so.1 and libcrumb_core.so, the declarations
_abi.py, and every shared library that these need beside glibc and libstdc++, under names of its own
("libgrpc-crumb.so.29"), so that a process that has loaded another build of one of them keeps it.
RPATHs are relative. The licences of bundled Debian packages go into lib/licenses.

The result runs on every x86-64 Linux with the glibc that is named in MANYLINUX or a newer one; a
library that needs more fails the bundling. Needs patchelf, strip, readelf and ldd.
"""

import argparse
import pathlib
import re
import shutil
import subprocess

import generate_abi

# The platform tag's glibc: pyproject.toml names manylinux_2_36.
MANYLINUX = (2, 36)
# Libraries that every manylinux_2_36 system has (PEP 600), and the vDSO.
SYSTEM = re.compile(r"linux-vdso\.so\.1|ld-linux-x86-64\.so\.2|lib(c|m|dl|rt|pthread|resolv|util)"
                    r"\.so\.\d+|libstdc\+\+\.so\.6|libgcc_s\.so\.1")
# Their versions must match the kernel's RDMA drivers, so they are the system's; UCX loads the
# modules that need them at run time, and does without where they are missing.
RDMA = re.compile(r"lib(ibverbs|mlx5|rdmacm)\.so\.\d+")
# UCX finds its modules by name in the folder ucx beside libucs, and they need each other by name.
MODULES = re.compile(r"libuct_(cma|ib|rdmacm)\.so\.\d+")
PROGRAMS = ("crumbd", "crumb")


def run(*command):
    return subprocess.run([str(part) for part in command], check=True, capture_output=True,
                          text=True).stdout


def needed_by(path):
    return re.findall(r"\(NEEDED\).*\[(.+?)\]", run("readelf", "-d", path))


def libraries_of(path):
    """The libraries that `path` needs and the system lacks: {name: file}."""
    places = dict(re.findall(r"^\s*(\S+) => (\S+)", run("ldd", path), re.MULTILINE))
    found = {}
    for name in needed_by(path):
        if any(kept.fullmatch(name) for kept in (SYSTEM, RDMA, MODULES)):
            continue
        if places.get(name, "not") == "not":
            raise SystemExit(f"bundle.py: {path} needs {name}, which is not installed")
        found[name] = pathlib.Path(places[name]).resolve()
    return found


def own_name(library):
    """libgrpc.so.29 -> libgrpc-crumb.so.29"""
    stem, extension = library.split(".so", 1)
    return f"{stem}-crumb.so{extension}"


def check_glibc(path):
    versions = re.findall(r"GLIBC_(\d+)\.(\d+)", run("readelf", "-V", path))
    newest = max(((int(major), int(minor)) for major, minor in versions), default=(0, 0))
    if newest > MANYLINUX:
        raise SystemExit(f"bundle.py: {path} needs glibc {newest[0]}.{newest[1]}, newer than the "
                         f"platform tag's {MANYLINUX[0]}.{MANYLINUX[1]}: build on Debian 12")


class Bundle:
    """A package folder that is being filled."""

    def __init__(self, build, folder, patchelf):
        self.build, self.folder, self.patchelf = build, folder, patchelf
        self.sources = {}  # library's name -> where it was found

    def add(self, source, place, rpath, *changes):
        """Copies a program or library, stripped, with its needs renamed and its RPATH set.
        `changes` are further arguments of patchelf."""
        target = self.folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        shutil.copyfile(source, target)
        target.chmod(0o755)
        run("strip", "--strip-unneeded", target)
        check_glibc(target)
        libraries = libraries_of(source)
        self.sources.update(libraries)
        renames = [part for name in libraries
                   for part in ("--replace-needed", name, own_name(name))]
        run(self.patchelf, "--set-rpath", rpath, *renames, *changes, target)

    def add_libraries(self):
        done = set()
        while set(self.sources) - done:
            for name in sorted(set(self.sources) - done):
                self.add(self.sources[name], f"lib/{own_name(name)}", "$ORIGIN", "--set-soname",
                         own_name(name))
                done.add(name)

    def add_ucx_modules(self):
        folder = self.sources["libucs.so.0"].parent / "ucx"
        for source in sorted(folder.iterdir()):
            if MODULES.fullmatch(source.name):
                self.add(source.resolve(), f"lib/ucx/{source.name}", "$ORIGIN/..:$ORIGIN")

    def add_licenses(self):
        """The copyright file of each Debian package that a bundled library is from."""
        folder = self.folder / "lib/licenses"
        folder.mkdir(parents=True, exist_ok=True)
        for source in self.sources.values():
            owner = ""
            for path in (source, f"*/{source.name}"):  # dpkg may know it as /lib/...
                found = subprocess.run(["dpkg", "-S", str(path)], capture_output=True, text=True,
                                       check=False)
                owner = owner or found.stdout.split(":", 1)[0]
            text = pathlib.Path("/usr/share/doc") / owner / "copyright"
            if not owner or not text.exists():
                raise SystemExit(f"bundle.py: {source} has no copyright file of a Debian package")
            shutil.copyfile(text, folder / f"{owner}.txt")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--headers", type=pathlib.Path, required=True)
    parser.add_argument("--to", type=pathlib.Path, required=True)
    parser.add_argument("--patchelf", default="patchelf")
    options = parser.parse_args()
    for path in (options.build / "bin/crumbd", options.build / "bin/crumb",
                 options.build / "lib/libcrumb.so.1"):
        if not path.exists():
            raise SystemExit(f"bundle.py: {path} is missing; build it first: cmake --preset "
                             "release && cmake --build --preset release --target crumbd crumb "
                             "crumb_c")
    options.to.mkdir(parents=True, exist_ok=True)
    bundle = Bundle(options.build, options.to, options.patchelf)
    for program in PROGRAMS:
        bundle.add(options.build / "bin" / program, f"bin/{program}", "$ORIGIN/../lib")
    bundle.add(options.build / "lib/libcrumb.so.1", "lib/libcrumb.so.1", "$ORIGIN")
    core = (options.build / "lib/libcrumb_core.so").resolve()
    bundle.add(core, f"lib/{core.name}", "$ORIGIN")
    bundle.add_ucx_modules()
    bundle.add_libraries()
    bundle.add_licenses()
    headers = generate_abi.read_headers(options.headers)
    (options.to / "_abi.py").write_text(generate_abi.generate(headers), encoding="utf-8")


if __name__ == "__main__":
    main()
