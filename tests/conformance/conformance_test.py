#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the cases of cases.py against crumbd, through the C interface; and shows that each of them
can fail: with a connector that makes one mistake exactly the cases of that mistake fail."""

import argparse
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "deploy"))
import c_engine  # noqa: E402
import cases  # noqa: E402
from services import Crumbd  # noqa: E402

OPTIONS = argparse.Namespace()


class ConformanceTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="crumb-conformance-")
        self.addCleanup(folder.cleanup)
        crumbd = Crumbd(OPTIONS.build / "bin", folder.name)
        self.addCleanup(crumbd.stop)
        crumbd.start()
        self.engine = c_engine.CEngine(OPTIONS.build / "lib/libcrumb.so", folder.name)

    def failures(self, engine, chosen=cases.CASES):
        return {case.name: wrong for case in chosen if (wrong := cases.check(case, engine))}

    def test_every_case(self):
        self.assertEqual(self.failures(self.engine), {})


def mistake_test(mistake, expected):
    def test(self):
        failures = self.failures(mistake(self.engine))
        self.assertEqual(set(failures), expected, failures)
    return test


for name, (make, expected_failures) in cases.MISTAKES.items():
    setattr(ConformanceTest, "test_connector_that_" + name.lower().replace(" ", "_"),
            mistake_test(make, expected_failures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    OPTIONS, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
