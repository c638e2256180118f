#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""check_language.py rejects retired words and comments without a subject, and nothing else."""

import os
import subprocess
import sys
import tempfile
import unittest

import check_language

GLOSSARY = """# Glossary

## Retired words

text

| retired | write |
|---|---|
| `anew` | again |

text with `code`

| was | x |
|---|---|
| `ask`, `asked`, `tell` | request |
| `unheard` | `synced` |

| was | y |
|---|---|
| `column` | row |
"""


class CheckLanguageTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.write(check_language.GLOSSARY, GLOSSARY)

    def write(self, name, text):
        path = os.path.join(self.folder.name, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def complaints(self, name, text):
        self.write(name, text)
        return [number for found, number, _, _ in check_language.complaints(self.folder.name)
                if found == name]

    def test_retired_word_in_a_comment(self):
        self.assertEqual([2], self.complaints("a/b.h", "int x;\nint y;  // made anew\n"))

    def test_retired_word_in_a_page(self):
        self.assertEqual([1], self.complaints("docs" + "/a.md", "It begins Anew.\n"))

    def test_the_position_of_a_file_is_no_retired_word(self):
        self.assertEqual([2], self.complaints("a/b.py", "at = file.tell()\nfile.tell(at)\n"))

    def test_retired_words_in_identifiers(self):
        self.assertEqual([1, 2, 3, 5], self.complaints(
            "a/b.h", "int anew;\nvoid BeginAnew();\nint unheard_;\nint task;\nenum { kAskTimeout };\n"))
        self.assertEqual([], self.complaints("a/c.h", "int tasks;\nint mask;\nint column;\nint synced;\n"))

    def test_rules_of_both_tables(self):
        self.write("a/b.h", "// It is asked anew.\n")
        self.assertEqual(["word", "term"], [
            rule for name, _, rule, _ in check_language.complaints(self.folder.name) if name == "a/b.h"])

    def test_retired_word_in_a_message(self):
        self.assertEqual([2], self.complaints(
            "a/b.cc", 'int x;\nLog("the pool is \\"made\\" anew");\n'))

    def test_comment_of_c_and_docstring(self):
        self.assertEqual([2, 3], sorted(self.complaints("a/b.h", "int x;\n/* Of the call,\n   anew */\n")))
        self.assertEqual([1, 4], self.complaints(
            "a/b.py", '"""What it does."""\n\ndef f():\n    """Where a page lies."""\n'))
        self.assertEqual([], self.complaints("a/c.py", 'x = """What is this?"""\n'))

    def test_the_first_two_tables_are_automatic(self):
        self.assertEqual([{"anew"}, {"ask", "asked", "tell", "unheard"}],
                         check_language.retired_words(self.folder.name))

    def test_comment_without_a_subject(self):
        self.assertEqual([1, 3, 4], self.complaints(
            "a/b.h", "// Of the last call.\nint x;\nint y;  // What was read\n// Which one it is.\n"))

    def test_opening_words_within_a_comment(self):
        self.assertEqual([], self.complaints(
            "a/b.h", "// The size\n// Of which is known.\n// Format of a row.\nint x;  // in bytes\n"))

    def test_trailing_comment_without_a_subject(self):
        self.assertEqual([1, 2, 3, 4, 5], self.complaints(
            "a/b.h", "int a;  // of its tiles\nint b;  // by slot\nint c;  // which is known\n"
            "int d;  // in the region\nint e;  // until then\n"))
        self.assertEqual([], self.complaints(
            "a/c.h", "int a;  // in bytes\nint b;  // the slots of a page\nint c;  // total\n"))

    def test_openings_that_refer_to_another_comment(self):
        self.assertEqual([1, 3, 5, 7], self.complaints(
            "a/b.h", "// The same, backwards.\nint a;\n// As Find, but later.\nint b;\n"
            "// Once, before all else.\nint c;\n// None: not known.\nint d;\n"))
        self.assertEqual([], self.complaints("a/c.h", "// Assigns a slot.\n// The sameness of it.\n"))

    def test_what_as_a_noun(self):
        self.assertEqual([2, 4], self.complaints(
            "a/b.h", "// Returns the page\n// and what it holds.\nint a;\nint b;  // unlike what it was\n"))
        self.assertEqual(["what"], [
            rule for name, _, rule, _ in check_language.complaints(self.folder.name) if name == "a/b.h"][:1])
        self.assertEqual([], self.complaints("a/c.cc", "// But what is it?\nPrint(\"what is it\");\n"))

    def test_exit_code_and_message(self):
        def run():
            return subprocess.run([sys.executable, "check_language.py", self.folder.name],
                                  capture_output=True, text=True, check=False,
                                  cwd=os.path.dirname(os.path.abspath(__file__)))

        self.write("a/b.h", "// Size of x.\n")
        self.assertEqual(0, run().returncode)
        self.write("a/b.h", "// Of x.\n")
        self.assertEqual(1, run().returncode)
        self.assertIn("a/b.h:1: a comment that opens with 'Of'", run().stdout)


if __name__ == "__main__":
    unittest.main()
