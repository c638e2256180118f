# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Load or recompute: whether a prefix that crumbd has is loaded."""

import collections
import dataclasses
import math
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
# Tokens of pages that are read in part when a lookup's time ends: half of the 16 pages that crumbd
# reads for it at once. They count once another page has arrived.
PARTLY_READ_TOKENS = 8 * 64
# Tokens that a lookup is taken to have brought if its time ended before a page arrived.
NOTHING_ARRIVED_TOKENS = 64
# Part of the predicted time to compute a prefix after which a lookup compares the speed of the pages
# that have arrived with that of computing them. A disk that is too slow costs a request this much.
PROBED = 0.02


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long a lookup waits for pages on SSD and other nodes.

    first: seconds after which it looks at the pages that have arrived. total: seconds that it waits
    in all if these came at `slowest` seconds per token or faster.
    """

    first: float
    total: float
    slowest: float = math.inf

    def more(self, tokens: int, seconds: float) -> float:
        """Seconds to wait on when pages of `tokens` tokens have arrived in `seconds`; 0: computing
        the others is faster."""
        worth = tokens > 0 and seconds <= (tokens + PARTLY_READ_TOKENS) * self.slowest
        return max(0.0, self.total - max(seconds, self.first)) if worth else 0.0


# Part of the time that a lookup may wait after which it compares again, if pages arrived fast enough
# before.
CHECKED = 0.25
NO_PATIENCE = Patience(0.0, 0.0)


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
    SSD and other nodes. Until the first two are known every prefix is loaded.
    """

    def __init__(self, random_value: Callable[[], float] = random.random) -> None:
        self._random = random_value
        self._load, self._arrival, self._compute = _Rate(), _Rate(), _Rate()

    def loaded(self, tokens: int, seconds: float) -> None:
        """A load of `tokens` tokens took `seconds` from its start to the last byte."""
        self._load.add(tokens, seconds)

    def arrived(self, tokens: int, seconds: float, late: bool) -> None:
        """A lookup waited `seconds` for pages on SSD and other nodes; those of `tokens` tokens
        arrived. late: others did not."""
        partly = PARTLY_READ_TOKENS if late and tokens > 0 else 0
        self._arrival.add(max(tokens + partly, NOTHING_ARRIVED_TOKENS), seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """A step that computed `tokens` tokens of prompts, and little else, took `seconds`."""
        self._compute.add(tokens, seconds)

    def worth_loading(self, tokens: int, queued_tokens: int = 0) -> bool:
        """Whether `tokens` tokens are predicted to be loaded faster than computed. queued_tokens:
        those of loads that were started before and have not ended, which come first."""
        return self._faster(tokens, queued_tokens, 0.0) or self._random() < EXPLORED

    def patience(self, tokens: int, queued_tokens: int, deadline: float) -> Patience:
        """How long to wait for `tokens` tokens whose pages have to arrive in host memory first, at
        most `deadline` seconds."""
        compute, arrival = self._compute.value(), self._arrival.value()
        if compute is None:
            return Patience(deadline, deadline)
        # A page is worth its wait if it arrives and is loaded faster than its tokens are computed.
        slowest = max(0.0, MARGIN * compute - (self._load.value() or 0.0))
        total = min(deadline, tokens * slowest)
        probe = Patience(min(total, PROBED * tokens * compute), total, slowest)
        if arrival is None:
            return probe
        if self._faster(tokens, queued_tokens, arrival):
            # The rate is looked at once more on the way, with time for the first pages.
            return dataclasses.replace(probe, first=max(probe.first, CHECKED * total))
        return probe if self._random() < EXPLORED else NO_PATIENCE

    def _faster(self, tokens: int, queued_tokens: int, arrival: float) -> bool:
        load, compute = self._load.value(), self._compute.value()
        if load is None or compute is None:
            return True
        # The queue moves on while pages arrive.
        seconds = tokens * load + max(tokens * arrival, queued_tokens * load)
        return seconds <= MARGIN * tokens * compute


class AlwaysLoad(LoadPolicy):
    """Loads every prefix and waits for every page."""

    def worth_loading(self, tokens: int, queued_tokens: int = 0) -> bool:
        return True

    def patience(self, tokens: int, queued_tokens: int, deadline: float) -> Patience:
        return Patience(deadline, deadline)


def slower(one: Tuple[int, float], other: Tuple[int, float]) -> Tuple[int, float]:
    """Returns the measurement of two ranks, (tokens, seconds), with the longer time per token: the
    engine waits for that rank. Ranks measure different loads in a step, so that they are not mixed.
    A measurement without tokens is none."""
    if not one[0] or not other[0]:
        return one if one[0] else other
    return max(one, other, key=lambda rank: rank[1] / rank[0])
