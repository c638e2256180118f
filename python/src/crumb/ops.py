# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Append, attend, store and load as torch operators, for models that are traced or compiled.

    import crumb.ops
    handle = crumb.ops.register(sequence)                  # or a Batch; an int
    appended = torch.ops.crumb.append(handle, layer, k, v)
    out = torch.ops.crumb.attend(handle, layer, q, appended)

    torch.ops.crumb.load(crumb.ops.register(load), layer, cache)      # a Load and a Store of
    torch.ops.crumb.store(crumb.ops.register(store), layer, cache)    # crumb.transfer

`append` returns an empty tensor that `attend` takes: it orders the two calls and keeps a compiler
from dropping the append, whose effect is in the sequence. Results are those of the methods of
Sequence and Batch. `load` writes one layer's rows into the transfer's cache, `store` reads them;
`cache` is a tensor of that layer's memory, from which the compiler knows the data flow. A
handle keeps its object alive until `unregister`.

The operators are not differentiable. Importing this module needs torch.
"""

import itertools
from typing import Any, Dict, Union

import torch

from crumb.errors import InvalidArgument
from crumb.gpu import Batch
from crumb.transfer import Load, Store
from crumb.worker import Sequence

Target = Union[Sequence, Batch, Load, Store]
_objects: Dict[int, Target] = {}
_next = itertools.count(1)


def register(target: Target) -> int:
    """A number for a Sequence, Batch, Load or Store that operators take."""
    handle = next(_next)
    _objects[handle] = target
    return handle


def unregister(handle: int) -> None:
    """Forgets a number of `register`; the object is not closed."""
    _objects.pop(handle, None)


def _object(handle: int) -> Any:
    target = _objects.get(handle)
    if target is None:
        raise InvalidArgument(f"no object is registered under {handle}")
    return target


def append(handle: int, layer: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Adds the fresh tokens' rows of one layer. Returns an empty tensor for `attend`."""
    _object(handle).append(layer, k, v)
    return k.new_empty(0)


def attend(handle: int, layer: int, q: torch.Tensor, appended: torch.Tensor) -> torch.Tensor:
    """Attention of the fresh tokens: q's shape, float32 for a Sequence, the batch's for a Batch."""
    result: torch.Tensor = _object(handle).attend(layer, q)
    return result


def load(handle: int, layer: int, cache: torch.Tensor) -> None:
    """Writes the rows of one layer into the cache of the load's transfer."""
    _object(handle).layers(layer, layer + 1)


def store(handle: int, layer: int, cache: torch.Tensor) -> torch.Tensor:
    """Reads the rows of one layer from the cache of the store's transfer. Returns an empty tensor,
    for something after it to depend on."""
    _object(handle).layers(layer, layer + 1)
    return cache.new_empty(0)


def _fake_load(handle: int, layer: int, cache: torch.Tensor) -> None:
    return None


def _fake_store(handle: int, layer: int, cache: torch.Tensor) -> torch.Tensor:
    return cache.new_empty(0)


def _fake_append(handle: int, layer: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    if k.shape != v.shape:
        raise InvalidArgument(f"k is {list(k.shape)}, v {list(v.shape)}")
    return k.new_empty(0)


def _fake_attend(handle: int, layer: int, q: torch.Tensor, appended: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q, dtype=torch.float32 if _object(handle).output_f32
                            else torch.bfloat16)


def _define(schema: str, function: Any, fake: Any) -> None:
    name = "crumb::" + schema.split("(")[0]
    # torch.library.custom_op does the same and wraps each call in Python once more. One
    # implementation serves every device; there is no gradient.
    torch.library.define(name, schema[schema.index("("):])
    torch.library.impl(name, "CompositeExplicitAutograd", function)
    torch.library.register_fake(name, fake)


_define("append(int handle, int layer, Tensor k, Tensor v) -> Tensor", append, _fake_append)
_define("attend(int handle, int layer, Tensor q, Tensor appended) -> Tensor", attend, _fake_attend)
_define("load(int handle, int layer, Tensor(a!) cache) -> ()", load, _fake_load)
_define("store(int handle, int layer, Tensor cache) -> Tensor", store, _fake_store)

__all__ = ["append", "attend", "load", "register", "store", "unregister"]
