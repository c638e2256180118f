#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Rejects retired words and comments without a subject: check_language.py [ROOT]

The first two tables below "## Retired words" in docs/glossary.md list the retired words; no line of
a page or of code may have them. Identifiers are split at capitals and underscores. A comment or a
docstring of Python may not open with a word that leaves its subject out ("Of", "what", "as"), nor
with a bare preposition ("by slot", "until then"; a unit, "in bytes", is no such phrase), and may not
use "what" as a noun."""

import argparse
import os
import re
import sys

from check_docs import files_of, read

GLOSSARY = "docs/glossary.md"
COMMENT = re.compile(r"(?:^|\s)(?://|#)\s?(.*)$")
# Openings that leave the subject out. A question may begin with any of them.
OPENING = re.compile(
    r"^((?i:of|for|what|whose|who|which|where|that|as)|The same|Once|None"
    r"|by|at|from|with|without|until|while|since|under|behind|beside|between|on|in(?! \w+([;,]|$)))\b(?!.*\?$)")
WHAT = re.compile(r"(?<!`)\bwhat\b(?!`|\.\w|.*\?)", re.IGNORECASE)
DOCSTRING = re.compile(r'(?:^|:\n)[ \t]*"""(.*?)"""', re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"(?<![\"'\w/])/\*(.*?)\*/", re.DOTALL)
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
CPP = (".h", ".c", ".cc", ".cu", ".cuh")
# Folders and files in which questions and answers are those of a language model.
OF_MODELS = ("bench/", "python/bench/", "docs/quality", "docs/models.md", "tests/bench/", "client/examples/",
             "deploy/demo.py", "deploy/chat_demo.py", "tests/deploy/chat_demo_test.py", "tests/models/fixtures/",
             "python/tests/long_context_test.py")
CODE = (".h", ".c", ".cc", ".cu", ".cuh", ".proto", ".py", ".sh", ".cmake", ".yaml")


def retired_words(root):
    """The words of the glossary's first and second table of retired words."""
    section = read(os.path.join(root, GLOSSARY)).partition("## Retired words")[2]
    tables = [table.partition("\n\n")[0] for table in section.split("\n\n|")[1:3]]
    return [{word.lower() for row in table.split("\n") for word in re.findall(r"`(\w+)`", cell_of(row))}
            for table in tables]


def cell_of(row):
    """The first cell of a table's row, whose leading bar may have been cut off."""
    return row.removeprefix("|").partition("|")[0]


def docstrings_of(text):
    """(line number, text, whether the line begins it) of each line of a Python docstring."""
    for found in DOCSTRING.finditer(text):
        first = text.count("\n", 0, found.start(1)) + 1
        for index, line in enumerate(found.group(1).split("\n")):
            yield first + index, line.strip(), index == 0


def block_comments_of(text):
    """(line number, text, whether the line begins it) of each line of a C comment."""
    for found in BLOCK.finditer(text):
        first = text.count("\n", 0, found.start(1)) + 1
        for index, line in enumerate(found.group(1).split("\n")):
            yield first + index, line.strip(" *"), index == 0


def comments_of(text):
    """(line number, text, whether the line begins a comment) of each comment line."""
    in_comment = False
    for number, line in enumerate(text.split("\n"), 1):
        found = COMMENT.search(line)
        if found is None:
            in_comment = False
            continue
        trailing = line[:found.start()].strip() != ""
        yield number, found.group(1), trailing or not in_comment
        in_comment = not trailing


def openings_of(name, text):
    """(line number, text, whether the line begins it) of each line of a comment or docstring."""
    lines = list(comments_of(text))
    if name.endswith(".py"):
        lines += docstrings_of(text)
    elif name.endswith(CPP):
        lines += block_comments_of(text)
    return lines


def complaints(root):
    """(file, line number, rule, complaint) of every violation. The rules are "word" and "term", for the
    glossary's first and second table, "opening" and "what"."""
    words, terms = retired_words(root)
    for name in files_of(root):
        if name in (GLOSSARY, "tests/style/check_language.py", "tests/style/check_language_test.py"):
            continue
        is_code = name.endswith(CODE) or os.path.basename(name) == "CMakeLists.txt"
        if not is_code and not name.endswith(".md"):
            continue
        text = read(os.path.join(root, name))
        for number, line in enumerate(text.split("\n"), 1):
            line = line.replace(".tell()", "")  # Python's name of a file's position
            found = {word.lower() for word in WORD.findall(line)}
            of_model = name.startswith(OF_MODELS)
            for rule, retired in (("word", words), ("term", set() if of_model else terms)):
                for word in sorted(found & retired)[:1]:
                    yield name, number, rule, f"'{word}' is retired: see {GLOSSARY}"
        for number, line, opens in openings_of(name, text) if is_code else ():
            if opens and (found := OPENING.match(line)):
                yield name, number, "opening", f"a comment that opens with '{found.group(1)}' has no subject"
            elif WHAT.search(line):
                yield name, number, "what", "'what' stands for a noun: name the thing"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("root", nargs="?", default=os.path.join(os.path.dirname(__file__), "../.."))
    found = [f"{name}:{number}: {complaint}"
             for name, number, _, complaint in complaints(parser.parse_args().root)]
    print("\n".join(found) or "no retired word, and every comment has a subject")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
