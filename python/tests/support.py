# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the package's tests: a crumbd of the package, a small model, rows."""

import array
import pathlib
import sys
import tempfile
import unittest

import crumb

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/deploy"))
from services import Crumbd  # noqa: E402

SECONDS = 20
MODEL = crumb.Model("made-up", "1", layers=2, kv_heads=2, q_heads=4, head_dim=64)


def installed(name):
    """A module, or None if it is not installed."""
    try:
        return __import__(name)
    except ImportError:
        return None


def bits(seed, count):
    """`count` BF16 values of magnitude 0.5 to 1 as their bits, by a fixed generator."""
    state, values = seed * 2654435761 % 2**32 or 1, array.array("H")
    for _ in range(count):
        state = (state * 1664525 + 1013904223) % 2**32
        values.append(0x3f00 | (state >> 16) & 0x807f)
    return values


class CrumbdTest(unittest.TestCase):
    """Tests with a crumbd of their own, whose programs are those of the package."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = folder.name
        cls.crumbd = Crumbd(pathlib.Path(crumb.path_of("crumbd")).parent, folder.name)
        cls.addClassCleanup(cls.crumbd.stop)
        cls.crumbd.start()

    def client(self, **options):
        client = crumb.Client(self.folder, **options)
        self.addCleanup(client.close)
        client.wait_connected(SECONDS)
        return client
