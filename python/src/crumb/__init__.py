# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Crumb: a distributed KV cache that keeps pages as 2-bit integers.

`Client` reaches crumbd; `Worker` and `Sequence` are a KV cache on the CPU, `GpuWorker` and `Batch`
one on a GPU; `crumb.ops` has torch operators; `generate` runs models of transformers.
docs/engines/python.md is the guide. Every call that fails raises a subclass of `Error`.
"""

from typing import TYPE_CHECKING, Any

from crumb._programs import path_of
from crumb.client import (BF16, INT2, KEY_BYTES, NO_PARENT, PAGE_TOKENS, Client, Found, Fragment,
                          Got, Keyspace, Miss, PutOutcome, Stats, Tier, foreign_key, page_keys)
from crumb.errors import (Aborted, DataLoss, DeadlineExceeded, Error, FailedPrecondition, Internal,
                          InvalidArgument, NotFound, OutOfRange, ResourceExhausted, Unavailable,
                          Unimplemented)
from crumb.gpu import Batch, GpuSequence, GpuSettings, GpuWorker
from crumb.transfer import Lease, PagedCache, PagedRows, Transfer
from crumb.worker import Model, Rank, Sequence, Worker, WorkerSettings

if TYPE_CHECKING:
    from crumb.transformers import generate


def __getattr__(name: str) -> Any:
    """`generate`, whose module imports torch and transformers, when it is first used."""
    if name == "generate":
        from crumb.transformers import generate as function
        return function
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BF16", "INT2", "KEY_BYTES", "NO_PARENT", "PAGE_TOKENS", "Aborted", "Batch", "Client",
    "DataLoss", "DeadlineExceeded", "Error", "FailedPrecondition", "Found", "Fragment", "Got",
    "GpuSequence", "GpuSettings", "GpuWorker", "Internal", "InvalidArgument", "Keyspace", "Lease",
    "Miss", "Model", "NotFound", "OutOfRange", "PagedCache", "PagedRows", "PutOutcome", "Rank",
    "ResourceExhausted", "Sequence", "Stats", "Tier", "Transfer", "Unavailable", "Unimplemented",
    "Worker", "WorkerSettings", "foreign_key", "generate", "page_keys", "path_of",
]
