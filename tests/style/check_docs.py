#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Complains where a page of the documentation leads nowhere: check_docs.py [ROOT]

A relative link of a Markdown file must lead to a file or folder of the tree, its #anchor to a
heading there; a page below docs/ that a source file names must exist; a link must lead to each
page below docs/ from another one, or no reader finds it; and where a list item is a link to a
source and the functions that one walks through there, `like`, `This`, the source must have them.
The commit that a file in bench/results names must be in the history, or bench/README.md must name
the commit that stands for it: `named` (existing). A clone without history is not checked for it."""

import os
import re
import subprocess
import sys

LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)
WALK = re.compile(r"^- \[[^\]]+\]\(([^)]+\.(?:cc|cu|h))\): (.*)$", re.MULTILINE)
RESULTS = "bench/results/"
RESULTS_PAGE = "bench/README.md"
COMMIT = re.compile(r'"commit": *"([0-9a-f]{7,40})(?:-dirty)?"')
REPLACED = re.compile(r"`([0-9a-f]{7,40})`\s+\(([0-9a-f]{7,40})\)")
PAGE = re.compile(r"(?<![\w./-])docs/[\w./-]+\.md\b")


def files_of(root):
    """Files that git tracks or would track; if root is no checkout, all but built files."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                            cwd=root, capture_output=True, text=True)
    if listed.returncode == 0:
        found = set(listed.stdout.split("\0"))
        return sorted(f for f in found if os.path.isfile(os.path.join(root, f)))
    found = (os.path.relpath(os.path.join(folder, name), root)
             for folder, _, names in os.walk(root) for name in names)
    return sorted(f for f in found if f.split(os.sep)[0] not in (".git", "build"))


def read(path):
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError:
        return ""


def anchors_of(text):
    """Anchors of a page's headings, as GitHub makes them."""
    anchors = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        times = sum(1 for other in anchors if re.fullmatch(re.escape(anchor) + r"(-\d+)?", other))
        anchors.add(f"{anchor}-{times}" if times else anchor)
    return anchors


def links_of(root, page):
    """(target below root, anchor) of each relative link of a page."""
    for link in LINK.findall(FENCE.sub("", read(os.path.join(root, page)))):
        if not re.match(r"[a-z]+:", link):
            path, _, anchor = link.partition("#")
            folder = os.path.dirname(page)
            yield os.path.normpath(os.path.join(folder, path)) if path else page, anchor


def links_complaints(root, page):
    for target, anchor in links_of(root, page):
        full = os.path.join(root, target)
        if not os.path.exists(full):
            yield f"{page}: no {target}"
        elif anchor and target.endswith(".md") and anchor not in anchors_of(read(full)):
            yield f"{page}: {target} has no heading #{anchor}"


def walks_complaints(root, page):
    for link, steps in WALK.findall(read(os.path.join(root, page))):
        source = os.path.normpath(os.path.join(os.path.dirname(page), link))
        text = read(os.path.join(root, source)) if os.path.exists(os.path.join(root, source)) else ""
        for function in re.findall(r"`([\w:]+)`", steps):
            if not re.search(rf"\b{re.escape(function)}\(", text):
                yield f"{page}: {source} has no function {function}"


def has_history(root):
    """Whether root is a git checkout with all of its history."""
    shallow = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=root,
                             capture_output=True, text=True)
    return shallow.returncode == 0 and shallow.stdout.strip() == "false"


def is_commit(root, name):
    found = subprocess.run(["git", "cat-file", "-e", name + "^{commit}"], cwd=root,
                           capture_output=True)
    return found.returncode == 0


def results_complaints(root, names):
    """Results whose commit is neither in the history nor replaced by one that is."""
    replaced = {}
    if RESULTS_PAGE in names:
        replaced = dict(REPLACED.findall(read(os.path.join(root, RESULTS_PAGE))))
    for name, stands_for in sorted(replaced.items()):
        if not is_commit(root, stands_for):
            yield f"{RESULTS_PAGE}: {stands_for} for {name} is no commit"
    for name in names:
        if not name.startswith(RESULTS) or not name.endswith(".json"):
            continue
        for commit in sorted(set(COMMIT.findall(read(os.path.join(root, name))))):
            if commit not in replaced and not is_commit(root, commit):
                yield f"{name}: {commit} is no commit, and {RESULTS_PAGE} names none for it"


def complaints(root):
    names = files_of(root)
    if has_history(root):
        yield from results_complaints(root, names)
    pages = [name for name in names if name.endswith(".md")]
    linked = {target for page in pages for target, _ in links_of(root, page) if target != page}
    for page in pages:
        if page.startswith("docs/") and page not in linked:
            yield f"{page}: no page has a link to it"
    for name in names:
        if name in pages:
            yield from links_complaints(root, name)
            yield from walks_complaints(root, name)
        else:
            for page in sorted(set(PAGE.findall(read(os.path.join(root, name))))):
                if not os.path.exists(os.path.join(root, page)):
                    yield f"{name}: no {page}"


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "../..")
    found = list(complaints(root))
    if not has_history(root):
        print("no git history: the commits of bench/results are not checked")
    print("\n".join(found) or "every link leads somewhere")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
