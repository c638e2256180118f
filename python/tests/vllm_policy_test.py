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

    def arrive(self, chooser, tokens, seconds, late=False):
        for _ in range(policy.LEAST_MEASUREMENTS):
            chooser.arrived(tokens, seconds, late)

    def test_pages_that_arrive_slowly_are_not_waited_for(self):
        for tokens, seconds, late, waits in ((1000, 0.1, False, True), (1000, 0.9, False, False),
                                             (0, 0.06, True, False), (700, 0.8, True, True),
                                             (700, 0.8, False, False)):
            chooser = self.chooser()
            self.arrive(chooser, tokens, seconds, late)
            patience = chooser.patience(1000, 0, 10.0)
            self.assertEqual(patience.first > 0, waits, (tokens, seconds))
            self.assertTrue(chooser.worth_loading(1000))

    def test_an_unknown_disk_costs_little(self):
        """Before the arrival of pages is known, a lookup looks after a small part of the time to
        compute the prompt, and goes on if the pages come fast enough."""
        chooser = self.chooser()  # 0.1 ms a token to load, 1 ms to compute
        patience = chooser.patience(32000, 0, 10.0)
        self.assertAlmostEqual(patience.first, policy.PROBED * 32.0)
        self.assertEqual(patience.total, 10.0)
        self.assertEqual(patience.more(0, patience.first), 0.0)
        self.assertEqual(patience.more(200, patience.first), 0.0)  # 0.9 ms a token
        self.assertAlmostEqual(patience.more(2000, patience.first), 10.0 - patience.first)
        # The prefix is not waited for longer than loading it may take.
        self.assertAlmostEqual(chooser.patience(1000, 0, 10.0).total, 0.7)
        self.assertAlmostEqual(chooser.patience(1000, 0, 0.01).first, 0.01)

    def test_an_engine_that_has_computed_nothing_waits(self):
        patience = policy.LoadPolicy(random_value=lambda: 1.0).patience(1000, 0, 10.0)
        self.assertEqual((patience.first, patience.total), (10.0, 10.0))

    def test_a_disk_that_has_become_slow_is_noticed_within_a_lookup(self):
        chooser = self.chooser()
        self.arrive(chooser, 1000, 0.1)
        patience = chooser.patience(32000, 0, 10.0)
        self.assertEqual(patience.first, policy.CHECKED * 10.0)
        self.assertEqual(patience.more(1000, patience.first), 0.0)
        self.assertEqual(patience.more(10000, patience.first), 7.5)

    def test_a_slow_disk_is_looked_at_again_now_and_then(self):
        chooser = self.chooser(random_value=0.001)
        self.arrive(chooser, 1000, 0.9)
        self.assertAlmostEqual(chooser.patience(32000, 0, 10.0).first, policy.PROBED * 32.0)

    def test_a_load_starts_when_those_in_front_of_it_have_ended(self):
        chooser = self.chooser()  # 0.1 ms a token to load, 1 ms to compute
        self.assertTrue(chooser.worth_loading(1000, 6000))
        self.assertFalse(chooser.worth_loading(1000, 8000))
        self.arrive(chooser, 1000, 0.5)
        self.assertGreater(chooser.patience(1000, 5000, 10.0).first, 0)  # they arrive meanwhile
        self.assertEqual(chooser.patience(1000, 8000, 10.0), policy.NO_PATIENCE)

    def test_measurements_of_ranks_are_not_mixed(self):
        fast, slow, none = (6400, 0.1), (64, 0.01), (0, 0.0)
        for one, other, expected in ((fast, slow, slow), (slow, fast, slow), (fast, none, fast),
                                     (none, slow, slow), (none, none, none), (fast, fast, fast)):
            self.assertEqual(policy.slower(one, other), expected)

    def test_always_means_always(self):
        chooser = self.chooser(load=10.0, kind=policy.AlwaysLoad)
        self.arrive(chooser, 0, 10.0, late=True)
        self.assertTrue(chooser.worth_loading(1000))
        self.assertEqual(chooser.patience(1000, 0, 10.0).first, 10.0)

    def test_a_few_are_loaded_to_correct_a_prediction(self):
        chooser = self.chooser(load=2.0, random_value=0.001)
        self.assertTrue(chooser.worth_loading(1000))


if __name__ == "__main__":
    unittest.main()
