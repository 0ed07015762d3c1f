"""Views numpy arrays and torch tensors as a name, a dtype, a shape and bytes, without importing torch.

Dtypes are named as in safetensors. numpy has neither bfloat16 nor the 8-bit floats: unsigned integers of the same width
carry their bits. Sharded tensors are recognised by the attributes of torch's DTensors (`to_local`, `placements`,
`device_mesh`). One process publishes each part: the first along every mesh dimension that replicates it.
"""

import sys
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from msgspec import Struct

from ebbtide.errors import InvalidRequest

#: safetensors' name -> little-endian numpy type of the same width, and the name in torch, numpy and ml_dtypes.
_DTYPES: Final = {
    "BOOL": ("|b1", "bool"),
    "U8": ("|u1", "uint8"),
    "I8": ("|i1", "int8"),
    "F8_E4M3": ("|u1", "float8_e4m3fn"),
    "F8_E5M2": ("|u1", "float8_e5m2"),
    "F8_E8M0": ("|u1", "float8_e8m0fnu"),
    "U16": ("<u2", "uint16"),
    "I16": ("<i2", "int16"),
    "F16": ("<f2", "float16"),
    "BF16": ("<u2", "bfloat16"),
    "U32": ("<u4", "uint32"),
    "I32": ("<i4", "int32"),
    "F32": ("<f4", "float32"),
    "U64": ("<u8", "uint64"),
    "I64": ("<i8", "int64"),
    "F64": ("<f8", "float64"),
}
#: safetensors' name -> little-endian numpy type of the same width.
CARRIERS: Final = MappingProxyType({name: np.dtype(bits) for name, (bits, _) in _DTYPES.items()})
_NAMES: Final = {spelling: name for name, (_, spelling) in _DTYPES.items()}


def carrier(dtype: str, *, field: str = "dtype") -> np.dtype[Any]:
    """Return the numpy type that carries `dtype`. Raises `InvalidRequest` naming `field` for an unknown dtype."""
    if (found := CARRIERS.get(dtype)) is None:
        raise InvalidRequest(f"{dtype[:32]!r} is none of {', '.join(CARRIERS)}", field=field)
    return found


def unit_width(dtype: str, *, field: str = "dtype") -> int:
    """Return the bytes of the units that carry `dtype`: 1, 2 or 4. Raises `InvalidRequest` naming `field`."""
    return min(carrier(dtype, field=field).itemsize, 4)


def dtype_name(spelling: str, *, field: str = "dtype") -> str:
    """Return safetensors' name of a type that numpy or torch prints so (`torch.bfloat16`). Raises `InvalidRequest`."""
    if (name := _NAMES.get(spelling.removeprefix("torch."))) is None:
        raise InvalidRequest(f"weights of type {spelling} cannot be published; cast them first", field=field)
    return name


class Part(Struct, frozen=True):
    """A process's own tensor and its place in the whole one."""

    local: Any
    start: tuple[int, ...] = ()  # empty: `local` is the whole tensor
    full: tuple[int, ...] = ()  # the whole tensor's shape; empty: `local` is the whole tensor


def is_sharded(value: Any) -> bool:
    return hasattr(value, "to_local")


def own_part(name: str, value: Any) -> Part | None:
    """Return the part of the sharded tensor `value` that this process publishes; None if it publishes nothing.

    Raises `InvalidRequest` naming the tensor if sums are pending, its placements are unknown, or this process holds
    anything but one box of it.
    """
    try:
        placements, mesh, full = tuple(value.placements), value.device_mesh, tuple(value.shape)
    except AttributeError:
        text = "is sharded in a way that is not known here; pass DTensors, or full tensors"
        raise InvalidRequest(text, field=name) from None
    if (coordinate := mesh.get_coordinate()) is None:
        return None
    indices: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}
    for size, at, placement in zip(mesh.shape, coordinate, placements, strict=True):
        if placement.is_replicate():
            if at:
                return None
            continue
        if not hasattr(placement, "dim") or placement.is_partial():
            raise InvalidRequest(f"has sums pending ({placement}); reduce it before it is published", field=name)
        dim = placement.dim % len(full)
        whole = indices[dim] if dim in indices else np.arange(full[dim])
        indices[dim] = _share(whole, size, at, getattr(placement, "split_factor", 1))
    local = value.to_local()
    if 0 in full:  # an empty tensor has no pieces; the first process publishes it
        return None if any(coordinate) else Part(local.reshape(full))
    return _part(name, local, full, indices)


def _part(name: str, local: Any, full: tuple[int, ...], indices: dict[int, Any]) -> Part | None:
    start = tuple(int(indices[dim][0]) if len(indices.get(dim, ())) else 0 for dim in range(len(full)))
    shape = tuple(len(indices[dim]) if dim in indices else length for dim, length in enumerate(full))
    if tuple(local.shape) != shape:
        text = f"has {list(local.shape)} here where its placements say {list(shape)}; give it the usual layout"
        raise InvalidRequest(text, field=name)
    if not all(shape):
        return None
    if any(one[-1] - one[0] + 1 != len(one) for one in indices.values()):
        raise InvalidRequest("has rows here that are not neighbours; give it the usual layout", field=name)
    return Part(local) if shape == full else Part(local, start, full)


def _share(indices: Any, parts: int, index: int, split_factor: int) -> Any:
    """Return part `index` of `parts` as torch cuts them: the first ones have equal lengths, the last less or nothing.

    A `split_factor` first cuts the indices into that many chunks, and takes part `index` of each (FSDP over tensor
    parallelism).
    """
    return np.concatenate([_chunk(chunk, parts, index) for chunk in _chunks(indices, split_factor)])


def _chunks(indices: Any, parts: int) -> list[Any]:
    return [_chunk(indices, parts, index) for index in range(parts)]


def _chunk(indices: Any, parts: int, index: int) -> Any:
    length = -(-len(indices) // parts)
    return indices[index * length : (index + 1) * length]


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
    copied. A DTensor becomes the piece that this process publishes (`own_part`).
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
