# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""The soak test judges samples as it should."""

import unittest

import soak

SECONDS = 7200.0


def sawtooth(leak_a_second, life_seconds):
    """MiB of a process that begins with 300 in each of its lives."""
    return [(float(t), 300 + leak_a_second * (t % life_seconds), t // life_seconds)
            for t in range(0, int(SECONDS), 2)]


def problem(samples, node=soak.STEADY_NODE):
    return soak.judge(node, "memory MiB", samples, 0.0, SECONDS)[1]


class JudgeTest(unittest.TestCase):
    def test_a_leak_is_found_though_its_process_ends(self):
        self.assertIn("grew", problem(sawtooth(1 / 60, 3600)))  # 1 MiB a minute
        self.assertIn("grew", problem(sawtooth(1 / 60, 480)))

    def test_a_leak_is_found_in_one_life(self):
        self.assertIn("grew", problem(sawtooth(1 / 60, 1e9)))
        self.assertIn("grew", problem(sawtooth(1 / 60, 1e9), node=1))

    def test_flat_values_are_fine(self):
        self.assertIsNone(problem(sawtooth(0, 3600)))
        steps = [(t, v + 40 * life, life) for t, v, life in sawtooth(0, 3600)]
        self.assertIsNone(problem(steps), "another level in another life")

    def test_too_few_samples_are_a_problem(self):
        self.assertIn("too few", problem([]))
        self.assertIn("too few", problem(sawtooth(0, 3600)[-3:]))


if __name__ == "__main__":
    unittest.main()
