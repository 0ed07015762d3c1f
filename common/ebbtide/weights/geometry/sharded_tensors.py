"""Selects the part of a sharded tensor that this process publishes.

Sharded tensors are recognised by the attributes of torch's DTensors (`to_local`, `placements`, `device_mesh`); torch is
not imported. One process publishes each part: the first along every mesh dimension that replicates it.
"""

from typing import Any

import numpy as np
from msgspec import Struct

from ebbtide.errors import InvalidRequest


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
