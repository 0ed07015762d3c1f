"""Parts of sharded tensors: over all processes they make up the tensor, each element published once."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ebbtide.errors import InvalidRequest
from ebbtide.types.weights import PolicyVersion
from ebbtide.weights import NamedTensor, as_array, build_manifest, named_tensor
from ebbtide.weights.tensors import own_part


class Mesh:
    def __init__(self, shape: tuple[int, ...], at: tuple[int, ...] | None) -> None:
        self.shape, self._at = shape, at

    def get_coordinate(self) -> list[int] | None:
        return None if self._at is None else list(self._at)


class Sharded:
    """What a DTensor shows of itself on one process of a mesh; its part is what torch would have there."""

    def __init__(self, full: torch.Tensor, mesh: Mesh, placements: tuple[Any, ...]) -> None:
        self.shape, self.device_mesh, self.placements = full.shape, mesh, placements
        at = mesh.get_coordinate()
        if at is not None and not any(placement.is_partial() for placement in placements):
            shape, start = _compute_local_shape_and_global_offset(full.shape, mesh.shape, at, placements)
            self._local = full
            for dim, (first, length) in enumerate(zip(start, shape, strict=True)):
                self._local = self._local.narrow(dim, max(first, 0) if length else 0, length)

    def to_local(self) -> torch.Tensor:
        return self._local


def parts(full: torch.Tensor, shape: tuple[int, ...], *placements: Any) -> list[NamedTensor]:
    """What each process of a mesh publishes."""
    found = []
    for at in itertools.product(*map(range, shape)):
        value = Sharded(full, Mesh(shape, at), placements)
        if own_part("w", value) is not None:
            found.append(named_tensor("w", value))
    return found


def whole(tensors: list[NamedTensor]) -> np.ndarray:
    (first, *_) = tensors
    if not first.full:
        assert len(tensors) == 1
        return as_array(first)
    found = np.zeros(first.full, as_array(first).dtype)
    for one in tensors:
        found[tuple(slice(a, a + n) for a, n in zip(one.start, one.shape, strict=True))] = as_array(one)
    return found


CASES = {
    "rows": ((4,), (Shard(0),)),
    "columns": ((4,), (Shard(1),)),
    "the last dimension": ((3,), (Shard(-1),)),
    "copies": ((4,), (Replicate(),)),
    "rows and columns": ((2, 3), (Shard(0), Shard(1))),
    "rows of rows": ((2, 2), (Shard(0), Shard(0))),
    "replicas of shards": ((2, 3), (Replicate(), Shard(0))),
    "shards of replicas": ((3, 2), (Shard(1), Replicate())),
    "FSDP over tensor parallelism": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "FSDP over columns": ((2, 2), (Shard(0), Shard(1))),
    "one process": ((1,), (Shard(0),)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [(8, 12), (7, 5), (3, 2), (1, 1)])
def test_every_element_is_published_once_and_where_it_belongs(name: str, size: tuple[int, int]) -> None:
    mesh, placements = CASES[name]
    full = torch.arange(size[0] * size[1], dtype=torch.float32).reshape(size)
    found = parts(full, mesh, *placements)
    assert sum(as_array(one).size for one in found) == full.numel()
    assert np.array_equal(whole(found), full.numpy())
    build_manifest("run", PolicyVersion(policy="policy", version=1), found)


def test_empty_and_whole_tensors_are_published_by_the_first_process() -> None:
    for size in ((0, 4), (4, 0)):
        (found,) = parts(torch.zeros(size), (2, 2), Shard(0), Shard(1))
        assert (found.shape, found.full) == (size, ())
    (found,) = parts(torch.ones(()), (2,), Replicate())
    assert (found.shape, found.full) == ((), ())


def test_a_process_outside_the_mesh_publishes_nothing() -> None:
    value = Sharded(torch.ones(4), Mesh((2,), None), (Shard(0),))
    assert own_part("w", value) is None
    with pytest.raises(InvalidRequest, match="no part that this process publishes") as caught:
        named_tensor("w", value)
    assert caught.value.field == "w"


def test_what_has_no_single_place_is_refused_by_name() -> None:
    full = torch.ones(8, 2)
    with pytest.raises(InvalidRequest, match="sums pending") as caught:
        own_part("w", Sharded(full, Mesh((2,), (0,)), (Partial(),)))
    assert caught.value.field == "w"
    scattered = Sharded(full, Mesh((2,), (0,)), (_StridedShard(0, split_factor=2),))
    with pytest.raises(InvalidRequest, match="not neighbours"):
        own_part("w", scattered)
    elsewhere = Sharded(full, Mesh((2,), (0,)), (Shard(0),))
    elsewhere._local = full[:3]
    with pytest.raises(InvalidRequest, match="where its placements say"):
        own_part("w", elsewhere)

    class Legacy:
        def to_local(self) -> torch.Tensor:
            return full

    with pytest.raises(InvalidRequest, match="not known here"):
        own_part("w", Legacy())
