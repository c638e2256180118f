# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Load or compute, in the vLLM connector: without vLLM and crumbd."""

import unittest

from vllm_requests_support import policy


class PolicyTest(unittest.TestCase):
    def chooser(self, load=0.1, compute=1.0, random_value=1.0, kind=None):
        """A policy that has measured these seconds for 1,000 tokens."""
        made = (kind or policy.LoadPolicy)(random_value=lambda: random_value)
        for _ in range(policy.LEAST_MEASUREMENTS):
            made.computed(1000, compute)
            made.loaded(1000, load)
        return made

    def test_everything_is_loaded_until_both_times_are_known(self):
        chooser = policy.LoadPolicy(random_value=lambda: 1.0)
        for _ in range(policy.LEAST_MEASUREMENTS):
            self.assertTrue(chooser.worth_loading(100))
            chooser.computed(100, 0.001)
        for _ in range(policy.LEAST_MEASUREMENTS):
            self.assertTrue(chooser.worth_loading(100))
            chooser.loaded(100, 1.0)
        self.assertFalse(chooser.worth_loading(100))

    def test_the_choice_follows_what_is_measured(self):
        chooser = self.chooser(load=2.0)
        self.assertFalse(chooser.worth_loading(1000))
        for _ in range(20):
            chooser.loaded(1000, 0.1)
        self.assertTrue(chooser.worth_loading(1000))

    def test_slow_first_times_do_not_decide(self):
        chooser = policy.LoadPolicy(random_value=lambda: 1.0)
        for _ in range(policy.LEAST_MEASUREMENTS):
            chooser.computed(1000, 0.025)
        for seconds in (1.3, 0.4, 0.003, 0.003, 0.003):
            self.assertTrue(chooser.worth_loading(1000))
            chooser.loaded(1000, seconds)
        self.assertTrue(chooser.worth_loading(1000))

    def test_pages_that_arrive_slowly_are_not_waited_for(self):
        for tokens, seconds, worth in ((1000, 0.1, True), (1000, 0.9, False), (0, 0.1, False)):
            chooser = self.chooser()
            for _ in range(policy.LEAST_MEASUREMENTS):
                self.assertTrue(chooser.worth_waiting(1000))
                chooser.arrived(tokens, seconds)
            self.assertEqual(chooser.worth_waiting(1000), worth)
            self.assertTrue(chooser.worth_loading(1000))

    def test_a_load_starts_when_those_in_front_of_it_have_ended(self):
        chooser = self.chooser()  # 0.1 ms a token to load, 1 ms to compute
        self.assertTrue(chooser.worth_loading(1000, 6000))
        self.assertFalse(chooser.worth_loading(1000, 8000))
        for _ in range(policy.LEAST_MEASUREMENTS):
            chooser.arrived(1000, 0.5)
        self.assertTrue(chooser.worth_waiting(1000, 5000))  # pages arrive while it is queued

    def test_measurements_of_ranks_are_not_mixed(self):
        fast, slow, none = (6400, 0.1), (64, 0.01), (0, 0.0)
        for one, other, expected in ((fast, slow, slow), (slow, fast, slow), (fast, none, fast),
                                     (none, slow, slow), (none, none, none), (fast, fast, fast)):
            self.assertEqual(policy.slower(one, other), expected)

    def test_always_means_always(self):
        chooser = self.chooser(load=10.0, kind=policy.AlwaysLoad)
        for _ in range(policy.LEAST_MEASUREMENTS):
            chooser.arrived(0, 10.0)
        self.assertTrue(chooser.worth_loading(1000) and chooser.worth_waiting(1000))

    def test_a_few_are_loaded_to_correct_a_prediction(self):
        chooser = self.chooser(load=2.0, random_value=0.001)
        self.assertTrue(chooser.worth_loading(1000))


if __name__ == "__main__":
    unittest.main()
