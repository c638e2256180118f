# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Addresses of tensors' memory, checked and without copies.

Accepted are torch tensors, numpy arrays and, on the CPU, objects with a buffer (bytes, bytearray,
array.array, ctypes arrays). BF16 is torch.bfloat16, ml_dtypes.bfloat16 or numpy.uint16 with the
bits of BF16 values. Neither torch nor numpy is imported here unless the caller has done so.
"""

import array
import ctypes
import sys
from typing import Any, Dict, Optional, Sequence, Tuple, Union

from crumb.errors import InvalidArgument

Shape = Tuple[int, ...]
# A parameter of type void* takes these: an address, or an object that ctypes takes the address of.
Address = Union[int, bytes, Any]


def _torch_error(value: Any, dtype: str, shape: Shape, on_gpu: bool, name: str) -> InvalidArgument:
    have = (f"{tuple(value.shape)} {value.dtype} on {value.device}"
            f"{'' if value.is_contiguous() else ', not contiguous'}")
    return InvalidArgument(f"{name} must be contiguous, {list(shape)}, {dtype}, on "
                           f"{'a CUDA device' if on_gpu else 'the CPU'}; it is {have}")


def _buffer(value: Any, itemsize: int, shape: Shape, writable: bool, name: str) -> Address:
    """The address of an object with a contiguous buffer of as many bytes as `shape` needs."""
    size = itemsize
    for extent in shape:
        size *= extent
    try:
        view = memoryview(value)
    except TypeError:
        raise InvalidArgument(f"{name} is a {type(value).__name__}, not a tensor") from None
    if view.nbytes != size or not view.c_contiguous or view.itemsize not in (1, itemsize):
        raise InvalidArgument(f"{name} must hold {size} contiguous bytes for {list(shape)}; it "
                              f"holds {view.nbytes}, in items of {view.itemsize}")
    if view.readonly:
        if writable or not isinstance(value, bytes):
            raise InvalidArgument(f"{name} is read-only")
        return value
    return ctypes.addressof((ctypes.c_char * size).from_buffer(value)) if size else None


# Whether a numpy dtype holds BF16: dtypes hash faster than they give their names.
_numpy_bf16: Dict[Any, bool] = {}


def _is_numpy_bf16(dtype: Any) -> bool:
    known = _numpy_bf16.get(dtype)
    if known is None:
        known = _numpy_bf16[dtype] = dtype.name in ("uint16", "bfloat16") and dtype.isnative
    return known


def bf16(value: Any, shape: Shape, name: str, on_gpu: bool = False,
         writable: bool = False) -> Address:
    """The address of BF16 values of exactly this shape. Raises InvalidArgument."""
    if hasattr(value, "data_ptr"):
        if (value.dtype is not sys.modules["torch"].bfloat16 or value.shape != shape or
                not value.is_contiguous() or not (value.is_cuda if on_gpu else value.is_cpu)):
            raise _torch_error(value, "bfloat16", shape, on_gpu, name)
        return value.data_ptr()
    if on_gpu:
        raise InvalidArgument(f"{name} must be a torch tensor on a CUDA device")
    if is_numpy(value):
        if value.shape != shape or not _is_numpy_bf16(value.dtype):
            raise InvalidArgument(f"{name} must be {list(shape)} of uint16 (bits of BF16) or "
                                  f"ml_dtypes.bfloat16; it is {value.shape} of {value.dtype}")
        return numpy_address(value, writable, name)
    return _buffer(value, 2, shape, writable, name)


def f32_out(value: Any, shape: Shape, name: str, on_gpu: bool = False) -> Address:
    """The address of writable F32 values of exactly this shape. Raises InvalidArgument."""
    if hasattr(value, "data_ptr"):
        if (value.dtype is not sys.modules["torch"].float32 or value.shape != shape or
                not value.is_contiguous() or not (value.is_cuda if on_gpu else value.is_cpu)):
            raise _torch_error(value, "float32", shape, on_gpu, name)
        return value.data_ptr()
    if is_numpy(value):
        if value.shape != shape or value.dtype.char != "f" or not value.dtype.isnative:
            raise InvalidArgument(f"{name} must be {list(shape)} of float32; it is {value.shape} "
                                  f"of {value.dtype}")
        return numpy_address(value, True, name)
    return _buffer(value, 4, shape, True, name)


def numpy_address(value: Any, writable: bool, name: str) -> int:
    """The address of a numpy array."""
    try:  # ten times as fast as __array_interface__, for contiguous and writable arrays
        return ctypes.addressof(ctypes.c_char.from_buffer(value))
    except (BufferError, TypeError, ValueError):
        pass
    if not value.flags.c_contiguous:
        raise InvalidArgument(f"{name} must be C-contiguous")
    if writable and not value.flags.writeable:
        raise InvalidArgument(f"{name} is read-only")
    return int(value.ctypes.data)


def strided_rows(value: Any, name: str) -> Tuple[int, Tuple[int, ...], Optional[int], bool]:
    """Address and strides in elements of writable BF16 or FP8 values of any strides, the ordinal of
    their CUDA device (None: the CPU), and whether they are FP8."""
    if hasattr(value, "data_ptr"):
        torch = sys.modules["torch"]
        fp8 = value.dtype is torch.float8_e4m3fn
        if not (fp8 or value.dtype is torch.bfloat16) or not (value.is_cpu or value.is_cuda):
            raise InvalidArgument(f"{name} is bfloat16 or float8_e4m3fn on the CPU or a CUDA "
                                  f"device, not {value.dtype} on {value.device}")
        return (value.data_ptr(), tuple(value.stride()),
                value.device.index if value.is_cuda else None, fp8)
    if not is_numpy(value) or not _is_numpy_bf16(value.dtype) or not value.flags.writeable:
        raise InvalidArgument(f"{name} is a torch tensor, or a writable numpy array of uint16 "
                              "(bits of BF16) or ml_dtypes.bfloat16; this is a "
                              f"{type(value).__name__}")
    return (int(value.ctypes.data),
            tuple(stride // value.itemsize for stride in value.strides), None, False)


def is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def new_f32(like: Any, shape: Shape) -> Any:
    """An uninitialized F32 tensor of the same library and device as `like`."""
    if hasattr(like, "data_ptr"):
        return like.new_empty(shape, dtype=sys.modules["torch"].float32)
    if is_numpy(like):
        return sys.modules["numpy"].empty(shape, sys.modules["numpy"].float32)
    size = 1
    for extent in shape:
        size *= extent
    return array.array("f", bytes(4 * size))


def tokens(ids: Any) -> Tuple[Address, int, Any]:
    """Token ids as int32: their address, their number, and an object that keeps them alive.

    int32 arrays and tensors on the CPU are not copied. Raises InvalidArgument.
    """
    if isinstance(ids, array.array) and ids.typecode == "i":
        return ids.buffer_info()[0], len(ids), ids
    if hasattr(ids, "data_ptr"):
        held = ids.detach().to(device="cpu", dtype=sys.modules["torch"].int32).contiguous()
        return held.data_ptr(), held.numel(), held
    if is_numpy(ids):
        held = sys.modules["numpy"].ascontiguousarray(ids, dtype="int32")
        return int(held.ctypes.data), held.size, held
    try:
        held = array.array("i", ids)
    except (OverflowError, TypeError) as error:
        raise InvalidArgument(f"token ids are integers of 32 bits: {error}") from None
    return held.buffer_info()[0], len(held), held


def rows_of(value: Any, row_bytes: int) -> int:
    """How many leading entries `value` has, where an entry has `row_bytes` bytes."""
    shape: Optional[Sequence[int]] = getattr(value, "shape", None)
    if shape is not None and len(shape) > 0 and not isinstance(value, memoryview):
        return int(shape[0])
    size = memoryview(value).nbytes
    return size // row_bytes
