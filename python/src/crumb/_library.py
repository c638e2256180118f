# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""The C library in this process, and handles that are closed exactly once."""

import ctypes
import os
import pathlib
import weakref
from types import TracebackType
from typing import Any, Callable, Mapping, Optional, Tuple, Type, TypeVar

from crumb import _abi
from crumb.errors import InvalidArgument, raise_error

Self = TypeVar("Self", bound="Handle")


def _load() -> Any:
    folder = pathlib.Path(__file__).absolute().parent / "lib"
    path = os.environ.get("CRUMB_LIBRARY") or str(folder / "libcrumb.so.1")
    library = ctypes.CDLL(path)
    loaded = library.crumb_abi_version()
    if loaded < _abi.CRUMB_ABI_VERSION:
        raise ImportError(f"{path} has version {loaded} of the C interface; this package needs "
                          f"{_abi.CRUMB_ABI_VERSION}")
    for name, (result, parameters) in _abi.FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = parameters
    return library


# Loading it starts no thread and reads no other library: libcrumb_core.so, with gRPC and the rest,
# is loaded by the first Client or Worker. ctypes releases the GIL around every call.
c = _load()


def check(code: int) -> None:
    """Raises the error of a call that did not return CRUMB_OK, with its message."""
    if code:
        raise_error(code, c.crumb_message().decode("utf-8", "replace"))


def milliseconds(seconds: float) -> int:
    """Whole milliseconds for a parameter of the C library: at least 1 for times above 0."""
    if not 0 <= seconds <= 4e6:
        raise InvalidArgument(f"{seconds} is not a time in seconds between 0 and 4,000,000")
    return max(1, round(seconds * 1000)) if seconds > 0 else 0


def text(value: Optional[str]) -> Optional[bytes]:
    """A C string, or NULL."""
    return None if value is None else value.encode()


def options_of(kind: Any, **members: Any) -> Any:
    """An options struct with its size set; every member that is not named is zero."""
    return kind(size=ctypes.sizeof(kind), **members)


def string_arrays(fields: Mapping[str, str]) -> Tuple[Any, Any]:
    """Names and values of `fields` as arrays of C strings."""
    array = ctypes.c_char_p * len(fields)
    return array(*(k.encode() for k in fields)), array(*(v.encode() for v in fields.values()))


class Handle:
    """Owner of a handle of the C library.

    `close` (or leaving a `with` block) closes the handle; otherwise the garbage collector or the
    end of the process does. REQUIRES: no other thread is inside a call on an object that is closed.
    """

    _handle: Optional[int] = None

    def _own(self, handle: Any, close: Callable[[int], None]) -> None:
        self._handle = handle.value
        self._finalizer = weakref.finalize(self, close, handle.value)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._handle is None

    def close(self) -> None:
        """Gives the handle back. Further calls do nothing."""
        self._handle = None
        self._finalizer()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self.close()

    def _check(self, code: int) -> None:
        """`check` for calls on this handle: the C library has no message for a closed one."""
        if code:
            self._open_handle()
            raise_error(code, c.crumb_message().decode("utf-8", "replace"))

    def _open_handle(self) -> int:
        if self._handle is None:
            raise InvalidArgument(f"the {type(self).__name__} is closed")
        return self._handle
