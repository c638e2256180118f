# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Counters of the connector in vLLM's log and in its Prometheus registry."""

from typing import Any, Dict, Optional

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (KVConnectorPromMetrics,
                                                                  KVConnectorStats)

from crumb.vllm._worker import Moved

# Member of Moved -> the counter's name and its help text.
COUNTERS = {
    "loaded_pages": ("vllm:crumb_loaded_pages", "Pages of 64 tokens that were loaded."),
    "failed_pages": ("vllm:crumb_failed_pages", "Pages that did not arrive and were recomputed."),
    "stored_pages": ("vllm:crumb_stored_pages", "Pages that were given to crumbd."),
    "refused_stores": ("vllm:crumb_refused_stores", "Stores for which there was no memory."),
    "load_seconds": ("vllm:crumb_load_seconds", "Time of loads."),
    "store_seconds": ("vllm:crumb_store_seconds", "Time of stores: steps wait for it."),
}


class CrumbStats(KVConnectorStats):
    """Sums of Moved since the last interval."""

    def __init__(self, data: Optional[Dict[str, Any]] = None) -> None:
        super().__init__(data=dict(data) if data else {})

    def add(self, moved: Moved) -> None:
        """Adds a worker's counts."""
        for name in COUNTERS:
            if getattr(moved, name):
                self.data[name] = self.data.get(name, 0) + getattr(moved, name)

    def reset(self) -> None:
        self.data: Dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> "CrumbStats":
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> Dict[str, Any]:
        return {f"Crumb {name.replace('_', ' ')}": round(value, 3)
                for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class CrumbPromMetrics(KVConnectorPromMetrics):
    """The counters in vLLM's own registry, with its labels."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any,
                 per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._of_engine: Dict[str, Any] = {}
        for member, (name, text) in COUNTERS.items():
            counter = self._counter_cls(name=name, documentation=text, labelnames=labelnames)
            self._of_engine[member] = {engine: counter.labels(*values)
                                       for engine, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: Dict[str, Any], engine_idx: int = 0) -> None:
        for member, value in transfer_stats_data.items():
            if member in self._of_engine:
                self._of_engine[member][engine_idx].inc(value)
