# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Load or recompute: whether a prefix that crumbd has is loaded."""

import collections
import random
import statistics
from typing import Callable, Deque, Optional, Tuple

# A rate is the median of its latest measurements, and unknown until there are some: the first ones
# include work that happens once, such as loading a kernel's code or pinning memory.
KEPT_MEASUREMENTS, LEAST_MEASUREMENTS = 9, 5
# A load is chosen when it is predicted to take at most this part of the time to compute the prefix:
# predictions err, and a load that is slower than computing costs the request.
MARGIN = 0.8
# Fraction of the prefixes predicted to be slower that are loaded all the same, so that a prediction
# that no longer holds is corrected.
EXPLORED = 0.02
# Tokens that a lookup is taken to have brought if the deadline passed before a page arrived.
NOTHING_ARRIVED_TOKENS = 64


class _Rate:
    """Seconds per token."""

    def __init__(self) -> None:
        self._latest: Deque[float] = collections.deque(maxlen=KEPT_MEASUREMENTS)

    def add(self, tokens: int, seconds: float) -> None:
        """Adds a measurement, unless it is of no token."""
        if tokens > 0:
            self._latest.append(seconds / tokens)

    def value(self) -> Optional[float]:
        """The median rate; None if it is not known yet."""
        return statistics.median(self._latest) if len(self._latest) >= LEAST_MEASUREMENTS else None


class LoadPolicy:
    """Compares the predicted times of loading and of computing a prefix.

    Both are taken to grow with the number of tokens, and a load starts when those in front of it
    have ended. The time per token is measured in this engine:
    that of computing, that of loading from host memory, and that in which pages arrive there from
    SSD and other nodes. Until they are known every prefix is loaded.
    """

    def __init__(self, random_value: Callable[[], float] = random.random) -> None:
        self._random = random_value
        self._load, self._arrival, self._compute = _Rate(), _Rate(), _Rate()

    def loaded(self, tokens: int, seconds: float) -> None:
        """A load of `tokens` tokens took `seconds` from its start to the last byte."""
        self._load.add(tokens, seconds)

    def arrived(self, tokens: int, seconds: float) -> None:
        """A lookup waited `seconds` for pages on SSD and other nodes; those of `tokens` tokens
        arrived."""
        self._arrival.add(max(tokens, NOTHING_ARRIVED_TOKENS), seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """A step that computed `tokens` tokens of prompts, and little else, took `seconds`."""
        self._compute.add(tokens, seconds)

    def worth_loading(self, tokens: int, queued_tokens: int = 0) -> bool:
        """Whether `tokens` tokens are predicted to be loaded faster than computed. queued_tokens:
        those of loads that were started before and have not ended, which come first."""
        return self._faster(tokens, queued_tokens, 0.0)

    def worth_waiting(self, tokens: int, queued_tokens: int = 0) -> bool:
        """Whether the same is predicted of pages that have to arrive in host memory first."""
        return self._faster(tokens, queued_tokens, self._arrival.value())

    def _faster(self, tokens: int, queued_tokens: int, arrival: Optional[float]) -> bool:
        load, compute = self._load.value(), self._compute.value()
        if load is None or compute is None or arrival is None:
            return True
        # The queue moves on while pages arrive.
        seconds = tokens * load + max(tokens * arrival, queued_tokens * load)
        if seconds <= MARGIN * tokens * compute:
            return True
        return self._random() < EXPLORED


class AlwaysLoad(LoadPolicy):
    """Loads every prefix and waits for every page."""

    def worth_loading(self, tokens: int, queued_tokens: int = 0) -> bool:
        return True

    def worth_waiting(self, tokens: int, queued_tokens: int = 0) -> bool:
        return True


def slower(one: Tuple[int, float], other: Tuple[int, float]) -> Tuple[int, float]:
    """Returns the measurement of two ranks, (tokens, seconds), with the longer time per token: the
    engine waits for that rank. Ranks measure different loads in a step, so that they are not mixed.
    A measurement without tokens is none."""
    if not one[0] or not other[0]:
        return one if one[0] else other
    return max(one, other, key=lambda rank: rank[1] / rank[0])
