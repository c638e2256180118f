#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""check_tidy.sh selects the sources of the right commits and honours its time limit.

The script runs in a small repository, with a program instead of clang-tidy that records its source."""

import json
import os
import shutil
import subprocess
import tempfile
import unittest

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "check_tidy.sh")
# The last argument of clang-tidy is the source; a source that contains BAD fails.
TIDY = '#!/bin/sh\nfor source; do :; done\necho "$source" >>"$RECORD"\nsleep "${TIDY_SLEEP:-0}"\n! grep -q BAD "$source"\n'


@unittest.skipUnless(shutil.which("git"), "needs git")
class CheckTidyTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = os.path.join(folder.name, "clone")
        self.record = os.path.join(folder.name, "record")
        tools = os.path.join(folder.name, "tools")
        os.makedirs(tools)
        tidy = os.path.join(tools, "clang-tidy-14")
        with open(tidy, "w", encoding="utf-8") as file:
            file.write(TIDY)
        os.chmod(tidy, 0o755)
        with open(os.path.join(tools, "nproc"), "w", encoding="utf-8") as file:
            file.write("#!/bin/sh\necho 1\n")  # one source at a time, so that the order is known
        os.chmod(os.path.join(tools, "nproc"), 0o755)
        self.environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "RECORD": self.record,
                            "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        os.makedirs(os.path.join(self.root, "tests/style"))
        os.makedirs(os.path.join(self.root, "build"))
        shutil.copy(SCRIPT, os.path.join(self.root, "tests/style"))
        self.git("init", "-q", "-b", "main")
        for name in ("a", "b", "c"):
            self.commit(f"{name}.cc")

    def git(self, *arguments):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments], cwd=self.root,
                       env=self.environment, check=True, capture_output=True)

    def commit(self, *names, text="x"):
        for name in names:
            path = os.path.join(self.root, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{text}\n")
        self.git("add", "--", *names)
        self.git("commit", "-q", "-m", "a commit")

    def check(self, *arguments, compiled=("a.cc", "b.cc", "c.cc", "tests/t.cc"), sleep=0):
        """The exit status, the sources checked in their order, and the output."""
        with open(os.path.join(self.root, "build/compile_commands.json"), "w", encoding="utf-8") as file:
            json.dump([{"directory": self.root, "file": name} for name in compiled], file)
        done = subprocess.run(
            ["bash", "tests/style/check_tidy.sh", "--build", "build", *arguments], cwd=self.root,
            env={**self.environment, "TIDY_SLEEP": str(sleep)}, capture_output=True, text=True, check=False)
        checked = []
        if os.path.exists(self.record):
            with open(self.record, encoding="utf-8") as file:
                checked = file.read().split()
            os.remove(self.record)
        return done.returncode, checked, done.stdout + done.stderr

    def test_all_latest_commits_and_not_just_one(self):
        self.commit("a.h")
        self.assertEqual((0, ["a.cc", "c.cc", "b.cc"]), self.check()[:2])

    def test_a_finding_in_an_older_commit_fails(self):
        self.commit("b.cc", text="BAD")
        self.commit("c.cc")
        self.assertNotEqual(0, self.check()[0])

    def test_commits_of_a_branch(self):
        self.git("update-ref", "refs/remotes/origin/HEAD", "HEAD~1")
        self.assertEqual(["c.cc"], self.check()[1])
        self.git("update-ref", "refs/remotes/origin/HEAD", "HEAD")
        self.assertEqual(["c.cc", "b.cc", "a.cc"], self.check()[1])

    def test_commits_since_a_tag(self):
        self.git("tag", "v1", "HEAD~2")
        self.assertEqual(["c.cc", "b.cc"], self.check()[1])

    def test_a_tag_of_the_last_commit_excludes_nothing(self):
        self.git("tag", "v1")
        self.assertEqual(["c.cc", "b.cc", "a.cc"], self.check()[1])

    def test_base_all_and_files(self):
        self.assertEqual(["c.cc"], self.check("--base", "HEAD~1")[1])
        self.assertEqual(["a.cc", "b.cc", "c.cc"], self.check("--all")[1])
        self.assertEqual(["b.cc"], self.check("b.cc")[1])
        self.assertEqual(2, self.check("--base", "missing")[0])

    def test_no_tests_no_removed_and_no_other_sources(self):
        self.commit("tests/t.cc", "d.cc")
        self.git("rm", "-q", "b.cc")
        self.git("commit", "-q", "-m", "remove")
        self.assertEqual(["c.cc", "a.cc"], self.check()[1])

    def test_time_limit_leaves_the_oldest(self):
        status, checked, output = self.check("--seconds", "1", sleep=1.1)
        self.assertEqual((0, ["c.cc"]), (status, checked))
        self.assertIn("2 sources were not reached within 1 s", output)
        self.assertEqual(2, self.check("--seconds", "soon")[0])


if __name__ == "__main__":
    unittest.main()
