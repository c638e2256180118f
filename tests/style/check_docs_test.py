#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""check_docs.py finds broken links, orphans and wrong walks, and nothing else."""

import os
import subprocess
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

    def test_page_without_a_link_to_it(self):
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


class ResultsTest(unittest.TestCase):
    """The commits that results name."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = folder.name

    def git(self, *arguments, root=None):
        done = subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
                              cwd=root or self.root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def write(self, name, text):
        path = os.path.join(self.root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def commit(self):
        self.git("init", "-q")
        self.git("commit", "-q", "--allow-empty", "-m", "first")
        return self.git("rev-parse", "HEAD")

    def test_commits_of_the_history(self):
        commit = self.commit()
        self.write("bench/results/a.json", f'{{"commit": "{commit[:12]}-dirty"}}')
        self.write("bench/results/b.json", f'{{"commit": "{commit}"}}')
        self.assertEqual([], list(check_docs.complaints(self.root)))

    def test_a_commit_that_is_gone_needs_one_that_stands_for_it(self):
        commit = self.commit()
        self.write("bench/results/a.json", '{"commit": "0123456789ab-dirty"}')
        self.assertEqual(1, len(list(check_docs.complaints(self.root))))
        self.write("bench/README.md", f"`0123456789ab` ({commit[:8]}) in `a.json`\n")
        self.assertEqual([], list(check_docs.complaints(self.root)))
        self.write("bench/README.md", "`0123456789ab`\n(01234567) in `a.json`\n")
        self.assertEqual(1, len(list(check_docs.complaints(self.root))))

    def test_without_history_nothing_is_said(self):
        self.write("bench/results/a.json", '{"commit": "0123456789ab"}')
        self.assertEqual([], list(check_docs.complaints(self.root)))  # no checkout
        self.commit()
        self.git("commit", "-q", "--allow-empty", "-m", "second")
        shallow = os.path.join(self.root, "clone")
        self.git("clone", "-q", "--depth", "1", "file://" + self.root, shallow)
        os.makedirs(os.path.join(shallow, "bench/results"))
        with open(os.path.join(shallow, "bench/results/a.json"), "w", encoding="utf-8") as file:
            file.write('{"commit": "0123456789ab"}')
        self.assertEqual([], list(check_docs.complaints(shallow)))


if __name__ == "__main__":
    unittest.main()
