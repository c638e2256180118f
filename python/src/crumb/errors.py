# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Exceptions of the C library's status codes, one class per code."""

from typing import Dict, NoReturn, Type

from crumb import _abi


class Error(Exception):
    """A call of the C library failed. `code` is its CRUMB_* status code; the text is its message.

    The base class stands for codes that this version of the package does not know.
    """

    code: int = -1

    def __init__(self, message: str, code: int = -1) -> None:
        super().__init__(message)
        if code >= 0:
            self.code = code


class InvalidArgument(Error, ValueError):
    """The caller's mistake: a wrong size, dtype, range or a closed object."""

    code = _abi.CRUMB_INVALID_ARGUMENT


class DeadlineExceeded(Error):
    """The time ran out and the outcome is unknown."""

    code = _abi.CRUMB_DEADLINE_EXCEEDED


class NotFound(Error, LookupError):
    """A file or a keyspace does not exist."""

    code = _abi.CRUMB_NOT_FOUND


class ResourceExhausted(Error):
    """Something is full: back off."""

    code = _abi.CRUMB_RESOURCE_EXHAUSTED


class FailedPrecondition(Error):
    """The call is not possible in this state: do not retry."""

    code = _abi.CRUMB_FAILED_PRECONDITION


class Aborted(Error):
    """The connection or the lease was lost: redo."""

    code = _abi.CRUMB_ABORTED


class OutOfRange(Error, IndexError):
    """A layer or page that is not there."""

    code = _abi.CRUMB_OUT_OF_RANGE


class Unimplemented(Error, NotImplementedError):
    """crumbd or the library does not have this function."""

    code = _abi.CRUMB_UNIMPLEMENTED


class Internal(Error):
    """An error of Crumb itself."""

    code = _abi.CRUMB_INTERNAL


class Unavailable(Error):
    """There is no crumbd, or no device: retry later."""

    code = _abi.CRUMB_UNAVAILABLE


class DataLoss(Error):
    """A checksum differed; nothing of the data may be used."""

    code = _abi.CRUMB_DATA_LOSS


BY_CODE: Dict[int, Type[Error]] = {
    kind.code: kind
    for kind in (InvalidArgument, DeadlineExceeded, NotFound, ResourceExhausted,
                 FailedPrecondition, Aborted, OutOfRange, Unimplemented, Internal, Unavailable,
                 DataLoss)
}


def raise_error(code: int, message: str) -> NoReturn:
    """Raises the exception of a status code."""
    kind = BY_CODE.get(code)
    if kind is None:
        raise Error(f"code {code}: {message}", code)
    raise kind(message)
