# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""How far a load that goes layer by layer has come.

The thread of the load moves it on; the thread of the engine, whose step computes the same layers in
the same order, waits for each layer before it attends it.
"""

import threading
from typing import Any, List


class LayerProgress:
    """The layers that were written, or enqueued for a device, so far. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._points: List[Any] = []
        self._ended = False

    def advance(self, point: Any) -> None:
        """One more layer. point: on a device, the place of its copies on their stream; None: the
        rows are there."""
        with self._changed:
            self._points.append(point)
            self._changed.notify_all()

    def end(self) -> None:
        """No further layer comes: all were written, or the load has failed."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self, layer: int) -> Any:
        """Waits for a layer; returns its point, None if there is none to wait for."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._points) > layer)
            return self._points[layer] if len(self._points) > layer else None

    def wait_end(self) -> Any:
        """Waits for the last layer; returns its point, None if there is none to wait for."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended)
            return self._points[-1] if self._points else None
