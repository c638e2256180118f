# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Load or recompute: whether a prefix that crumbd has is loaded."""

import random
from typing import Callable, Optional

# Weight of a new measurement in the moving averages.
NEW_WEIGHT = 0.2
# A load is chosen when it is predicted to take at most this part of the time to compute the prefix:
# predictions err, and a load that is slower than computing costs the request.
MARGIN = 0.8
# Fraction of the prefixes predicted to be slower that are loaded all the same, so that a prediction
# that no longer holds is corrected.
EXPLORED = 0.02


class LoadPolicy:
    """Compares the predicted times of loading and of computing a prefix.

    Both are taken to grow with the number of tokens. The time per token is measured in this engine,
    for either; until both are known every prefix is loaded.
    """

    def __init__(self, random_value: Callable[[], float] = random.random) -> None:
        self._random = random_value
        self._load_seconds_per_token: Optional[float] = None
        self._compute_seconds_per_token: Optional[float] = None

    def loaded(self, tokens: int, seconds: float) -> None:
        """A load of `tokens` tokens took `seconds` from its start to the last byte."""
        if tokens > 0:
            self._load_seconds_per_token = _averaged(self._load_seconds_per_token,
                                                     seconds / tokens)

    def computed(self, tokens: int, seconds: float) -> None:
        """A step that computed `tokens` tokens of prompts, and little else, took `seconds`."""
        if tokens > 0:
            self._compute_seconds_per_token = _averaged(self._compute_seconds_per_token,
                                                        seconds / tokens)

    def worth_loading(self, tokens: int) -> bool:
        """Whether `tokens` tokens are predicted to be loaded faster than computed."""
        load, compute = self._load_seconds_per_token, self._compute_seconds_per_token
        if load is None or compute is None or tokens * load <= MARGIN * tokens * compute:
            return True
        return self._random() < EXPLORED


def _averaged(before: Optional[float], now: float) -> float:
    return now if before is None else before + NEW_WEIGHT * (now - before)
