#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Tests the status page of a crumbd with hostile names, on a small and a large screen."""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from browser import Browser
from services import MODEL, ROOT, Crumbd, Load, prompt_of, run_worker, wait_for

BIN = ROOT / "build/release/bin"
SAVE = None  # path for the documentation's screenshot
HOSTILE = "</td><script>document.title='broken'</script><img src=x onerror=\"document.title='b'\">"
# A model name is its folder's name, which cannot contain a slash.
HOSTILE_MODEL = "evil<script>document.title='broken'<img src=x onerror=alert(1)>" + "w" * 120
SCREENS = [(width, dark) for width in (400, 1200) for dark in (False, True)]


class StatusPageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory(prefix="crumb-status-")
        cls.addClassCleanup(cls.temporary.cleanup)
        folder = pathlib.Path(cls.temporary.name)
        cls.crumbd = Crumbd(BIN, folder)
        cls.crumbd.start()
        cls.addClassCleanup(cls.crumbd.stop)
        for number in (0, 1, 0, 2, 0, 1):
            run_worker(BIN, folder, prompt_of(number))
        wait_for("samples", lambda: float(cls.status()["uptime_seconds"]) > 4)
        if SAVE is not None:
            cls.save(folder)
        shutil.copytree(MODEL, folder / HOSTILE_MODEL)
        run_worker(BIN, folder, prompt_of(3), model=folder / HOSTILE_MODEL)
        for keyspace in cls.status()["keyspaces"]:
            subprocess.run([BIN / "crumb", "--socket-dir", folder, "keyspace", "state",
                            keyspace["keyspace"], "bf16", "--reason", HOSTILE],
                           check=True, capture_output=True, timeout=30)
        cls.browser = Browser(folder / "profile")
        cls.addClassCleanup(cls.browser.close)

    @classmethod
    def status(cls):
        return json.loads(cls.crumbd.get("/status.json"))

    @classmethod
    def save(cls, folder):
        load = Load(BIN, folder, [0, 3, 1, 4, 0, 5, 6, 1, 7, 0, 8, 9])
        wait_for("more samples", lambda: float(cls.status()["uptime_seconds"]) > 40, seconds=60)
        load.stop()
        browser = Browser(folder / "saving")
        browser.open(f"http://{cls.crumbd.endpoints['admin']}/", 1000, 800, dark=False)
        SAVE.parent.mkdir(parents=True, exist_ok=True)
        SAVE.write_bytes(browser.screenshot())
        browser.close()

    def open(self, width, dark):
        self.browser.open(f"http://{self.crumbd.endpoints['admin']}/", width, 800, dark)

    def test_it_fits_every_screen(self):
        for width, dark in SCREENS:
            with self.subTest(width=width, dark=dark):
                self.open(width, dark)
                self.assertEqual(self.browser.value("innerWidth"), width)
                self.assertLessEqual(
                    self.browser.value("document.documentElement.scrollWidth"), width)
                size = self.browser.value("parseFloat(getComputedStyle(document.body).fontSize)")
                self.assertGreaterEqual(size, 16)
                self.assertGreater(len(self.browser.screenshot()), 5000)

    def test_text_stands_out_in_light_and_dark(self):
        contrast = """(() => {
          const light = (c) => { const f = (v) => (v /= 255) <= 0.03928 ? v / 12.92
              : ((v + 0.055) / 1.055) ** 2.4;
            const [r, g, b] = c.match(/\\d+/g).map(Number);
            return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b); };
          const of = (node, back) => { const a = light(getComputedStyle(node).color);
            const b = light(getComputedStyle(back).backgroundColor);
            return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); };
          const card = document.querySelector('section');
          return [of(document.querySelector('h1'), document.body),
                  of(document.querySelector('section p'), card),
                  of(document.querySelector('.warning'), card)]; })()"""
        seen = []
        for dark in (False, True):
            self.open(1200, dark)
            for ratio in self.browser.value(contrast):
                self.assertGreaterEqual(ratio, 4.5)  # WCAG AA
            seen.append(self.browser.value("getComputedStyle(document.body).backgroundColor"))
        self.assertNotEqual(seen[0], seen[1])

    def test_hostile_names_are_text(self):
        self.open(400, False)
        self.assertEqual(self.browser.value("document.title"), "crumbd")
        self.assertEqual(self.browser.value("document.querySelectorAll('script, img').length"), 0)
        text = self.browser.value("document.body.innerText")
        self.assertIn(HOSTILE, text)
        self.assertIn(HOSTILE_MODEL, text)

    def test_nothing_is_loaded_from_elsewhere(self):
        self.open(1200, False)
        urls = {e["params"]["request"]["url"] for e in self.browser.events
                if e.get("method") == "Network.requestWillBeSent"}
        admin = f"http://{self.crumbd.endpoints['admin']}/"
        self.assertEqual({u for u in urls if not u.startswith("data:")}, {admin})
        self.assertLess(len(self.crumbd.get("/")), 64 * 1024)

    def test_it_shows_what_crumbd_counts(self):
        self.open(1200, False)
        text = self.browser.value("document.body.innerText")
        for part in ("Hit rate", "Bytes saved", "Tiers", "Nodes", "Keyspaces", "Recent warnings"):
            self.assertIn(part, text)
        shown = self.browser.value("document.getElementById('hit-rate').innerText")
        rate = float(re.match(r"([\d.]+) %", shown)[1])
        tokens = self.status()["lookup_tokens"]
        hits = sum(n for tier, n in tokens.items() if tier not in ("miss", "window"))
        self.assertGreater(hits, 0)
        self.assertAlmostEqual(rate, 100 * hits / sum(tokens.values()), delta=0.1)
        bars = self.browser.value("document.querySelector('path.host').getAttribute('d').length")
        self.assertGreater(bars, 10)
        self.assertIn(self.status()["node_id"], text)

    def test_no_script_runs_even_if_one_got_in(self):
        self.open(1200, False)
        self.browser.value("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\""
                           "document.title=1\"><button id=b onclick=\"document.title=1\">')")
        self.browser.value("document.getElementById('b').click()")
        self.assertEqual(self.browser.value("document.title"), "crumbd")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", type=pathlib.Path, default=BIN)
    parser.add_argument("--save-screenshot", type=pathlib.Path, metavar="PNG",
                        help="also write the page as the documentation shows it")
    arguments, rest = parser.parse_known_args()
    BIN = arguments.bin.resolve()
    SAVE = arguments.save_screenshot
    unittest.main(argv=[sys.argv[0], *rest])
