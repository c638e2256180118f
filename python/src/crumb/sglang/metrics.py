# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Counters of the linker, and their way into SGLang's Prometheus metrics."""

import dataclasses
import functools
from typing import Any, Dict


@dataclasses.dataclass
class Counters:
    """Counts since the linker was made."""

    lookups: int = 0
    loaded_pages: int = 0
    refused_loads: int = 0
    failed_loads: int = 0
    stored_pages: int = 0
    refused_offloads: int = 0


HELP = {
    "lookups": "Prompts that were looked up in crumbd.",
    "loaded_pages": "Pages of 64 tokens that were loaded.",
    "refused_loads": "Prefixes that were found but could not be loaded, and were computed.",
    "failed_loads": "Batches of loads that broke off: SGLang aborts their requests.",
    "stored_pages": "Pages that were given to crumbd.",
    "refused_offloads": "Nodes of the radix tree that were not stored: a bound, or no crumbd.",
}


@functools.lru_cache(maxsize=None)
def _process_counters() -> Dict[str, Any]:
    """Counters of this process, which may have one engine after another."""
    import prometheus_client
    return {name: prometheus_client.Counter(f"sglang:crumb_{name}", text)
            for name, text in HELP.items()}


class Exporter:
    """Adds the counts to counters of prometheus_client, whose values SGLang's server gathers
    from its processes if it runs with --enable-metrics."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._exported = Counters()
        self._of = _process_counters()

    def export(self) -> None:
        """Adds the counts since the last call."""
        for name, counter in self._of.items():
            now = getattr(self._counters, name)
            counter.inc(now - getattr(self._exported, name))
            setattr(self._exported, name, now)
