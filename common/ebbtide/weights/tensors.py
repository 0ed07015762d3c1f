"""A tensor as a name, a dtype, a shape and bytes, made from numpy arrays or, without importing it, from torch."""

import sys
from typing import Any

import numpy as np
from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.weights.dtypes import carrier, dtype_name


class NamedTensor(Struct, frozen=True, kw_only=True):
    """`data` holds the elements of `shape` in C order, little-endian, as flat bytes; maybe a view of live memory.

    A piece of a sharded tensor says where it lies: at `start` in the tensor of shape `full`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    start: tuple[int, ...] = ()
    full: tuple[int, ...] = ()


def named_tensor(name: str, value: Any, *, dtype: str | None = None) -> NamedTensor:
    """View a numpy array, an object with `__array__`, or a torch tensor of any device as a `NamedTensor`.

    `dtype` gives the bits another name of the same width (a uint16 array as `BF16`). Contiguous host memory is not
    copied.
    Raises `InvalidRequest` naming the tensor for types that weights cannot have and for sharded tensors.
    """
    if isinstance(value, NamedTensor):
        return value
    if hasattr(value, "to_local"):
        raise InvalidRequest("is sharded over devices; pass its full tensor", field=name)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        found, shape = dtype_name(str(value.dtype), field=name), tuple(value.shape)
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        array = np.asarray(value)
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        found, shape = dtype_name(array.dtype.name, field=name), array.shape
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if dtype is not None and carrier(dtype, field=name).itemsize != carrier(found).itemsize:
        raise InvalidRequest(f"elements of {found} cannot be called {dtype}: the widths differ", field=name)
    return NamedTensor(name=name, dtype=dtype or found, shape=shape, data=memoryview(flat))


def as_array(tensor: NamedTensor) -> np.ndarray[Any, np.dtype[Any]]:
    """The tensor, not copied, as a numpy array of its carrier type (BF16 as uint16, F8 as uint8)."""
    flat = np.asarray(tensor.data).view(carrier(tensor.dtype, field=tensor.name))
    return flat.reshape(tensor.shape)
