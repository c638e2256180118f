#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Rejects retired words and comments without a subject: check_language.py [--update] [ROOT]

The first table below "## Retired words" in docs/glossary.md lists the retired words; pages,
comments and the string literals of C++ may not have them. A comment or a docstring of Python may
not open with a word that leaves its subject out ("Of", "For", "What", "Whose", "Who", "Which",
"Where"). Text that was written before this check is counted by folder in language_baseline.txt; a
folder may not exceed its count, and --update lowers the counts to what is left."""

import argparse
import collections
import os
import re
import sys

from check_docs import files_of, read

BASELINE = "tests/style/language_baseline.txt"
GLOSSARY = "docs/glossary.md"
COMMENT = re.compile(r"(?:^|\s)(?://|#)\s?(.*)$")
OPENING = re.compile(r"^(Of|For|What|Whose|Who|Which|Where)\b(?!.*\?$)")
DOCSTRING = re.compile(r'(?:^|:\n)[ \t]*"""(.*?)"""', re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"(?<![\"'\w/])/\*(.*?)\*/", re.DOTALL)
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
CPP = (".h", ".c", ".cc", ".cu", ".cuh")
CODE = (".h", ".c", ".cc", ".cu", ".cuh", ".proto", ".py", ".sh", ".cmake", ".yaml")


def retired_words(root):
    """The words of the glossary's first table of retired words."""
    section = read(os.path.join(root, GLOSSARY)).partition("## Retired words")[2]
    table = section.partition("\n\n|")[2].partition("\n\n")[0]
    return re.findall(r"^\|? ?`(\w+)`", table, re.MULTILINE)


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


def strings_of(text):
    """(line number, text, False) of each string literal in C++, which may reach a user."""
    for number, line in enumerate(text.split("\n"), 1):
        for found in STRING.findall(line.partition("//")[0]):
            yield number, found, False


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


def complaints(root):
    """(file, line number, what is wrong) of every violation."""
    words = retired_words(root)
    retired = re.compile(r"\b(" + "|".join(words) + r")\b", re.IGNORECASE) if words else None
    for name in files_of(root):
        if name in (GLOSSARY, "tests/style/check_language.py", "tests/style/check_language_test.py"):
            continue
        text = read(os.path.join(root, name))
        if name.endswith(".md"):
            lines = [(n, line, False) for n, line in enumerate(text.split("\n"), 1)]
        elif name.endswith(CODE) or os.path.basename(name) == "CMakeLists.txt":
            lines = list(comments_of(text))
            if name.endswith(".py"):
                lines += docstrings_of(text)
            elif name.endswith(CPP):
                lines += [*block_comments_of(text), *strings_of(text)]
        else:
            continue
        for number, line, opens in lines:
            if retired is not None and (found := retired.search(line)):
                yield name, number, f"'{found.group(1)}' is retired: see {GLOSSARY}"
            if opens and (found := OPENING.match(line)):
                yield name, number, f"a comment that opens with '{found.group(1)}' has no subject"


def folder_of(name):
    return os.path.dirname(name) or "."


def read_baseline(root):
    counts = {}
    path = os.path.join(root, BASELINE)
    if not os.path.exists(path):
        return counts
    for line in read(path).splitlines():
        if line and not line.startswith("#"):
            folder, count = line.rsplit(" ", 1)
            counts[folder] = int(count)
    return counts


def write_baseline(root, counts):
    with open(os.path.join(root, BASELINE), "w", encoding="utf-8") as file:
        file.write("# Violations that check_language.py tolerates in each folder, to be brought to zero.\n")
        file.writelines(f"{folder} {counts[folder]}\n" for folder in sorted(counts) if counts[folder])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--update", action="store_true", help="lower the baseline to the present counts")
    parser.add_argument("--list", action="store_true", help="list every violation")
    parser.add_argument("root", nargs="?", default=os.path.join(os.path.dirname(__file__), "../.."))
    options = parser.parse_args()
    found = collections.defaultdict(list)
    for name, number, what in complaints(options.root):
        found[folder_of(name)].append(f"{name}:{number}: {what}")
    counts = {folder: len(lines) for folder, lines in found.items()}
    tolerated = read_baseline(options.root)
    if options.list:
        print("\n".join(line for lines in found.values() for line in lines))
    if options.update:
        first = not tolerated
        write_baseline(options.root, {folder: count if first else min(count, tolerated.get(folder, 0))
                                      for folder, count in counts.items()})
        tolerated = read_baseline(options.root)
    worse = [folder for folder in sorted(counts) if counts[folder] > tolerated.get(folder, 0)]
    for folder in worse:
        print(f"{folder}: {counts[folder]} violations, {tolerated.get(folder, 0)} are tolerated:")
        print("\n".join("  " + line for line in found[folder]))
    if not worse:
        print(f"{sum(counts.values())} violations are left, none of them new")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
