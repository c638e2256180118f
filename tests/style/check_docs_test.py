#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""check_docs.py finds what it is for, and nothing else."""

import os
import tempfile
import unittest

import check_docs

D = "docs"  # apart from the names below it: this file is checked as well
PAGE = f"{D}/cache.md"


class CheckDocsTest(unittest.TestCase):
    def complaints(self, files):
        with tempfile.TemporaryDirectory() as root:
            for name, text in files.items():
                os.makedirs(os.path.join(root, os.path.dirname(name)), exist_ok=True)
                with open(os.path.join(root, name), "w", encoding="utf-8") as file:
                    file.write(text)
            return list(check_docs.complaints(root))

    def test_links_that_lead_somewhere(self):
        self.assertEqual([], self.complaints({
            "README.md": f"[cache]({PAGE}#when-it-is-full) [docs]({D}) [out](https://a/b#c)",
            PAGE: "# Cache\n[up](../README.md) [here](#when-it-is-full)\n## When it is full\n",
            "cache.cc": f"// {PAGE} has the account.\n"}))

    def test_missing_page(self):
        self.assertEqual([f"README.md: no {D}/gone.md"],
                         self.complaints({"README.md": f"[gone]({D}/gone.md)"}))

    def test_link_is_relative_to_its_page(self):
        self.assertEqual([f"{PAGE}: no {D}/{PAGE}"],
                         self.complaints({PAGE: f"[self]({PAGE})", "README.md": f"[x]({PAGE})"}))

    def test_page_that_nobody_finds(self):
        self.assertEqual([f"{PAGE}: no page has a link to it"],
                         self.complaints({PAGE: "# Cache\n[here](#cache)\n", "README.md": "docs"}))

    def test_missing_heading(self):
        self.assertEqual([f"README.md: {PAGE} has no heading #emptying"],
                         self.complaints({"README.md": f"[x]({PAGE}#emptying)",
                                          PAGE: "# Filling\n```\n# emptying\n```\n"}))

    def test_headings_as_they_are_linked(self):
        self.assertEqual({"life-of-a-page", "errors-and-then", "the-kernel_one", "a-link", "twice",
                          "twice-1"},
                         check_docs.anchors_of("# Life of a page\n## Errors, and then\n"
                                               "### The `kernel_one`\n# A [link](x.md)\n"
                                               "# Twice\n# Twice\n"))

    def test_source_names_a_missing_page(self):
        self.assertEqual([f"cache.cc: no {PAGE}"],
                         self.complaints({"cache.cc": f"// {PAGE} has the account.\n"}))

    def test_walks_name_functions_that_are_there(self):
        self.assertEqual([f"{PAGE}: cache.cc has no function Cache::Gone"], self.complaints({
            "README.md": f"[x]({PAGE})",
            "cache.cc": "void Cache::Put(int page) { Grow(page); }\n",
            PAGE: "- [cache.cc](../cache.cc): `Cache::Put`, `Grow`, `Cache::Gone`\n"}))

    def test_code_in_a_page_is_no_link(self):
        self.assertEqual([], self.complaints({"README.md": "```\nf[i](j)\n```\n"}))


if __name__ == "__main__":
    unittest.main()
