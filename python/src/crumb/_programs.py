# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Console scripts: `crumbd` and `crumb` become the programs inside the package."""

import os
import pathlib
import sys
from typing import NoReturn


def path_of(program: str) -> str:
    """The path of "crumbd" or "crumb" inside the package."""
    return str(pathlib.Path(__file__).absolute().parent / "bin" / program)


def _become(program: str) -> NoReturn:
    path = path_of(program)
    # The process becomes the program: signals and the exit code need no forwarding.
    os.execv(path, [program, *sys.argv[1:]])


def crumbd() -> NoReturn:
    """The server."""
    _become("crumbd")


def crumb() -> NoReturn:
    """The command-line tool."""
    _become("crumb")
