#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""crumb.plot over the reports of bench/results, drawn into a stand-in for matplotlib's axes, and by
matplotlib itself where it is installed. Needs neither crumbd nor the library."""

import importlib.util
import json
import pathlib
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
REPORT = ROOT / "bench/results/cpu/quality.json"
SPEC = importlib.util.spec_from_file_location("plot", ROOT / "python/src/crumb/plot.py")
plot = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(plot)


class Axes:
    """Records the drawing calls."""

    def __init__(self):
        self.points, self.calls = {}, []

    def errorbar(self, x, y, yerr, label, **_):
        self.points[label] = (x, y, yerr)

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, *args))


class PlotTest(unittest.TestCase):
    def test_every_method_of_the_longest_context_is_a_point(self):
        axes = Axes()
        self.assertIs(plot.quality(str(REPORT), axes=axes), axes)
        measured = {row["method"]: ([row["bits"]], [row["kl"]], [row["kl_error"]])
                    for row in json.loads(REPORT.read_text())["rows"] if row["context"] == 4096}
        self.assertGreater(len(measured), 5)
        self.assertEqual(axes.points, measured)
        self.assertIn(("set_yscale", "log"), axes.calls)
        self.assertIn(("set_title", "4,096 tokens"), axes.calls)

    def test_a_metric_a_context_and_methods_are_chosen(self):
        report = json.loads(REPORT.read_text())
        axes = Axes()
        plot.quality(report, metric="top1", context=1024, methods=["oscar", "crumb"], axes=axes)
        self.assertEqual(list(axes.points), ["oscar", "crumb"])
        for row in report["rows"]:
            if row["context"] == 1024 and row["method"] == "crumb":
                self.assertEqual(axes.points["crumb"][1], [row["top1"]])
        self.assertNotIn(("set_yscale", "log"), axes.calls)

    def test_what_a_report_lacks_is_named(self):
        for arguments, text in (({"metric": "speed"}, "no metric 'speed'"),
                                ({"metric": "passkey"}, "no figures of 'passkey'"),
                                ({"context": 5}, r"contexts \[1024, 2048, 4096\], and not 5"),
                                ({"methods": ["crumb", "zip"]}, "and not zip")):
            with self.assertRaisesRegex(ValueError, text):
                plot.rows(REPORT, **arguments)
        with self.assertRaisesRegex(ValueError, "no list of rows"):
            plot.rows({"rows": 3})
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write("[]")
            file.flush()
            with self.assertRaisesRegex(ValueError, "no list of rows"):
                plot.rows(file.name)

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "needs matplotlib")
    def test_matplotlib_draws_it(self):
        import matplotlib
        matplotlib.use("svg")
        from matplotlib import pyplot
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "quality.svg"
            plot.quality(REPORT)
            pyplot.savefig(file)
            self.assertIn("<svg", file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    unittest.main()
