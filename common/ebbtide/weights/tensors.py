"""Views numpy arrays and torch tensors as a name, a dtype, a shape and bytes, without importing torch."""

import sys
from typing import Any

import numpy as np
from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.weights.dtypes import carrier, dtype_name
from ebbtide.weights.geometry.sharded_tensors import Part, is_sharded, own_part


class NamedTensor(Struct, frozen=True, kw_only=True):
    """A whole tensor, or one piece of a sharded tensor."""

    name: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    data: memoryview  # flat bytes of the elements in C order, little-endian; can be a view of live memory
    start: tuple[int, ...] = ()  # a piece lies here in its tensor; empty: whole
    full: tuple[int, ...] = ()  # the shape of a piece's tensor; empty: whole


def named_tensor(name: str, value: Any, *, dtype: str | None = None) -> NamedTensor:
    """View a numpy array, an object with `__array__`, or a torch tensor of any device as a `NamedTensor`.

    `dtype` gives the bits another name of the same width (a uint16 array as `BF16`). Contiguous host memory is not
    copied. A DTensor becomes the piece that this process publishes (`ebbtide.weights.geometry.sharded_tensors`).
    Raises `InvalidRequest` naming the tensor if its type is unsupported or this process publishes no part of it.
    """
    if isinstance(value, NamedTensor):
        return value
    if not is_sharded(value):
        return _plain(name, value, dtype, Part(value))
    if (part := own_part(name, value)) is None:
        raise InvalidRequest("has no part that this process publishes", field=name)
    return _plain(name, part.local, dtype, part)


def _plain(name: str, value: Any, dtype: str | None, part: Part) -> NamedTensor:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        found, shape = dtype_name(str(value.dtype), field=name), tuple(value.shape)
        try:
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        except (RuntimeError, NotImplementedError) as error:
            raise InvalidRequest(f"its elements cannot be read ({error})", field=name) from None
    else:
        array = np.asarray(value)
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        found, shape = dtype_name(array.dtype.name, field=name), array.shape
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if dtype is not None and carrier(dtype, field=name).itemsize != carrier(found).itemsize:
        raise InvalidRequest(f"elements of {found} cannot be called {dtype}: the widths differ", field=name)
    return NamedTensor(
        name=name, dtype=dtype or found, shape=shape, data=memoryview(flat), start=part.start, full=part.full
    )


def as_array(tensor: NamedTensor) -> np.ndarray[Any, np.dtype[Any]]:
    """View the tensor, without a copy, as a numpy array of its carrier type (BF16 as uint16, F8 as uint8)."""
    flat = np.asarray(tensor.data).view(carrier(tensor.dtype, field=tensor.name))
    return flat.reshape(tensor.shape)
