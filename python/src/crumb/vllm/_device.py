# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""CUDA streams of the connector, and times of work on them.

This module does not import vLLM, and torch only when it is used.
"""

import collections
from typing import Any, Deque, Tuple


class DeviceStreams:
    """The streams of one device: vLLM's, on which steps run, one for loads and one for stores."""

    def __init__(self, device: int) -> None:
        import torch
        self._cuda = torch.cuda
        self._device = device
        # Kernels of waiting loads start before those of the step: they are few and short, and a
        # request waits for them.
        self._loads = torch.cuda.Stream(device, priority=-1)
        self._stores = torch.cuda.Stream(device)

    def begin_store(self) -> int:
        """Lets the stream for stores wait for the work that is enqueued on the current stream so
        far; returns it, a cudaStream_t."""
        self._stores.wait_event(self.mark())
        return int(self._stores.cuda_stream)

    def mark_stores(self) -> Any:
        """The point behind the stores that are enqueued so far: they have read their blocks."""
        event = self._cuda.Event()
        event.record(self._stores)
        return event

    def wait_for(self, point: Any) -> None:
        """Lets the current stream wait for a point on another one."""
        self._cuda.current_stream(self._device).wait_event(point)

    def mark(self) -> Any:
        """A point on the current stream: the work that is enqueued so far."""
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._device))
        return event

    def begin_load(self, behind: Any) -> "LoadSpan":
        """Lets the stream for loads wait for the point `behind`, and times the following copies."""
        self._loads.wait_event(behind)
        return LoadSpan(self._cuda, self._loads)


class LoadSpan:
    """The work of one load on the stream for loads, a cudaStream_t in `stream`."""

    def __init__(self, cuda: Any, stream: Any) -> None:
        self._begin, self._end = (cuda.Event(enable_timing=True) for _ in range(2))
        self._cuda, self._stream = cuda, stream
        self.stream = int(stream.cuda_stream)
        self._begin.record(stream)

    def mark(self) -> Any:
        """A point on the stream: the copies that are enqueued so far."""
        event = self._cuda.Event()
        event.record(self._stream)
        return event

    def end(self) -> None:
        """The work is enqueued."""
        self._end.record(self._stream)

    def seconds(self) -> float:
        """How long the device took from `begin_load` to `end`. Blocks until then."""
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3


class StepTimer:
    """Seconds that steps take on the current stream of a device, read without waiting for it."""

    # Steps that are timed at once; further ones are not, until the device has run one of these.
    QUEUED_MAX = 64

    def __init__(self, device: int) -> None:
        import torch
        self._cuda = torch.cuda
        self._device = device
        self._begin: Any = None
        self._queued: Deque[Tuple[int, Any, Any]] = collections.deque()

    def begin(self) -> None:
        """The step begins behind the work that is enqueued so far."""
        self._begin = self._event() if len(self._queued) < self.QUEUED_MAX else None

    def end(self, tokens: int) -> None:
        """The step, which computes `tokens` tokens of prompts, is enqueued."""
        if self._begin is not None:
            self._queued.append((tokens, self._begin, self._event()))
        self._begin = None

    def take(self) -> Tuple[int, float]:
        """Tokens and seconds of the steps that the device has run since the last call."""
        tokens, seconds = 0, 0.0
        while self._queued and self._queued[0][2].query():
            count, begin, end = self._queued.popleft()
            tokens += count
            seconds += begin.elapsed_time(end) / 1e3
        return tokens, seconds

    def _event(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event
