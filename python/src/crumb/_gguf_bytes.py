# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""The bytes of the files that import_gguf reads and writes."""

import os
import struct
from typing import Any

# Bytes of a metadata value by its type, and the types without a size of their own.
VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9


class GgufError(ValueError):
    """The GGUF file is damaged, or needs a feature that is not supported; the text says which."""


def check_lengths(path: "str | os.PathLike[str]") -> None:
    """Raises GgufError if the metadata names more entries or bytes than the file has.

    The package gguf reads behind a file's end without an error, as often as an array has elements,
    so a file of 100 bytes could keep it busy for ever and take all memory.
    """
    def take(layout: str) -> Any:
        data = source.read(struct.calcsize(order + layout))
        if len(data) < struct.calcsize(order + layout):
            raise GgufError("not a readable GGUF file: it ends in its metadata")
        return struct.unpack(order + layout, data)[0]

    def skip(size: int) -> None:
        if size > length - source.tell():
            raise GgufError("not a readable GGUF file: it ends in its metadata")
        source.seek(size, os.SEEK_CUR)

    def skip_value(kind: int, depth: int) -> None:
        if kind in VALUE_BYTES:
            skip(VALUE_BYTES[kind])
        elif kind == STRING:
            skip(take("Q"))
        elif kind == ARRAY and depth < 4:
            element, count = take("I"), take("Q")
            if element in VALUE_BYTES:
                skip(VALUE_BYTES[element] * count)
                return
            for _ in range(count):  # each reads bytes, so it ends with the file
                skip_value(element, depth + 1)
        else:
            raise GgufError(f"not a readable GGUF file: a value of type {kind}")

    order = "<"
    with open(path, "rb") as source:
        length = source.seek(0, os.SEEK_END)
        source.seek(0)
        if source.read(4) != b"GGUF":
            raise GgufError("not a GGUF file")
        version = take("I")
        if version & 0xffff == 0:  # a small number in the other byte order
            order = ">"
        tensors, fields = take("Q"), take("Q")
        for _ in range(fields):
            skip(take("Q"))
            skip_value(take("I"), 0)
        for _ in range(tensors):
            skip(take("Q"))
            dimensions = take("I")
            skip(8 * dimensions + 4 + 8)


def encoded(values: Any, dtype: str) -> bytes:
    """Float32 values as little-endian F32, F16 or BF16."""
    import numpy
    if dtype == "F32":
        return bytes(values.astype("<f4").tobytes())
    if dtype == "F16":
        with numpy.errstate(over="ignore"):
            halves = values.astype("<f2")
        if not numpy.isfinite(halves).all():
            raise GgufError("a tensor has values beyond those of f16; use --dtype bf16 or f32")
        return bytes(halves.tobytes())
    bits = numpy.ascontiguousarray(values, dtype="<f4").view("<u4")
    rounded = bits + 0x7fff + ((bits >> 16) & 1)  # to nearest, ties to even
    return bytes((rounded >> 16).astype("<u2").tobytes())
