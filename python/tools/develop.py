#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Makes a package folder of links into a build: develop.py --build DIR --to DIR

With DIR on PYTHONPATH, `import crumb` takes the sources of this tree and the libraries and programs
of the build, where it was built. For development, and for machines without the wheel's tools.
"""

import argparse
import pathlib
import re

import generate_abi

ROOT = pathlib.Path(__file__).resolve().parents[2]


def link(target, place):
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(target)


def stage(build, folder):
    """Fills folder/crumb; returns `folder`."""
    package = folder / "crumb"
    sources = ROOT / "python/src/crumb"
    for source in sorted(sources.rglob("*")):
        if source.suffix in (".py", ".typed"):
            link(source, package / source.relative_to(sources))
    for name in ("crumbd", "crumb"):
        link(build.resolve() / "bin" / name, package / "bin" / name)
    for library in sorted((build.resolve() / "lib").glob("libcrumb*.so*")):
        link(library, package / "lib" / library.name)
    headers = generate_abi.read_headers(ROOT / "client/api")
    (package / "_abi.py").write_text(generate_abi.generate(headers), encoding="utf-8")
    write_entry_points(folder)
    return folder


def write_entry_points(folder):
    """Lets programs that look for plugins find those of pyproject.toml, as in an installed
    wheel."""
    project = (ROOT / "python/pyproject.toml").read_text(encoding="utf-8")
    groups = re.findall(r'^\[project\.entry-points\."(.+)"\]\n((?:[a-z_]+ = ".+"\n)+)', project,
                        re.MULTILINE)
    place = folder / "crumb_kv-0.dist-info"
    place.mkdir(exist_ok=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: crumb-kv\nVersion: 0\n",
                                    encoding="utf-8")
    (place / "entry_points.txt").write_text(
        "".join(f"[{name}]\n" + lines.replace('"', "") for name, lines in groups),
        encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--to", type=pathlib.Path, required=True)
    options = parser.parse_args()
    stage(options.build, options.to)


if __name__ == "__main__":
    main()
