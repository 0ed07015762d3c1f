"""Changes that are found where tensors lie: those that the host finds, and nothing else is brought over."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ebbtide.client.publisher.tensor_snapshots import TensorSnapshot
from ebbtide.trainer.learning import gpu_changes
from ebbtide.trainer.learning.gpu_changes import KeptTensor, KeptTensors, has_room
from ebbtide.weights import NamedTensor, describe, named_tensor
from ebbtide.weights.patch import Kind
from ebbtide.weights.version_encoding import Described, Encoded, Encoding, Found, apply_found, encode_version

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]
TILE = 4096


def pair(dtype: torch.dtype, density: float, elements: int = 20_000) -> tuple[Tensor, Tensor]:
    """A tensor, and it after a step of a unit or two at about this share of its elements."""
    draw = torch.Generator().manual_seed(0)
    base = torch.randn(elements, generator=draw).to(dtype)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}[dtype.itemsize]
    units = base.clone().view(bits)
    step = torch.randint(1, 3, units.shape, generator=draw) * (torch.rand(units.shape, generator=draw) < density)
    return base, (units + step.to(bits)).view(dtype)


def host(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(named_tensor("w", tensor).data, np.uint8)


def look(base: Tensor, new: Tensor, device: str) -> tuple[Found, np.ndarray[Any, np.dtype[np.uint8]]]:
    """What is found, and the new bits as they are made of it."""
    kept, into = KeptTensor(base.to(device), TILE), np.zeros(base.nbytes, np.uint8)
    assert all(changes is None for changes in kept.fetch(into))
    assert into.tobytes() == host(base).tobytes()
    into[:] = 0
    assert kept.follow(new.to(device))
    found = kept.fetch(into)
    apply_found(found, host(base), into, TILE)
    return found, into


def encoded(base: Tensor, new: Tensor, found: Found) -> Encoding:
    first = named_tensor("w", base)
    described = Described((first,), (describe(first, TILE),))
    encoding = Encoding([named_tensor("w", new)], described, tile_bytes=TILE, found=[found])
    encoding.work()
    plain = encode_version([named_tensor("w", new)], described, tile_bytes=TILE)
    assert encoding.result() == plain.result()
    return encoding


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("density", [0.0, 0.001, 0.03, 0.06, 0.9, 1.0])
def test_bits_and_patch_are_those_that_the_host_makes(device: str, dtype: torch.dtype, density: float) -> None:
    base, new = pair(dtype, density)
    found, bits = look(base, new, device)
    assert bits.tobytes() == host(new).tobytes()
    encoded(base, new, found)


@pytest.mark.parametrize("device", DEVICES)
def test_tiles_that_changed_much_come_whole_among_others(device: str) -> None:
    base, new = pair(torch.bfloat16, 0.02, 10 * TILE // 2)
    new[2048:4096] = torch.randn(2048).to(torch.bfloat16)
    new.view(torch.int16)[6144:8192] = base.view(torch.int16)[6144:8192] ^ 8
    found, bits = look(base, new, device)
    assert bits.tobytes() == host(new).tobytes()
    assert [number for number, changes in enumerate(found) if changes is None] == [1, 3]
    encoding = encoded(base, new, found)
    blobs = [encoding.blob(digest) for digest in encoding.result().patches[0].digests[:4]]
    assert [Kind(blob[1]) for blob in blobs] == [Kind.SPARSE, Kind.PACKED, Kind.SPARSE, Kind.XOR]


def test_a_large_tensor_is_looked_at_a_stride_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_changes, "_STRIDE", 3 * TILE)
    base, new = pair(torch.bfloat16, 0.03, 12_345)
    for part in (slice(0, 12_345), slice(0, 0), slice(1, 12_345), slice(4, 12_000)):
        found, bits = look(base[part], new[part], "cpu")
        assert bits.tobytes() == host(new[part]).tobytes()
        encoded(base[part], new[part], found)


@pytest.mark.parametrize("device", DEVICES)
def test_only_changes_are_brought_to_the_host_where_few_units_changed(device: str) -> None:
    base, new = pair(torch.bfloat16, 0.03)
    kept, into = KeptTensor(base.to(device), TILE), np.full(base.nbytes, 7, np.uint8)
    kept.fetch(np.empty_like(into))
    assert kept.follow(new.to(device))
    found = [changes for changes in kept.fetch(into) if changes is not None]
    changes = int((base.view(torch.int16) != new.view(torch.int16)).sum())
    assert sum(positions.nbytes + differences.nbytes for positions, differences in found) == changes * (4 + 2)
    assert (into == 7).all()


def take(snapshot: TensorSnapshot, tensors: Any, base: TensorSnapshot, described: Described | None) -> Encoded:
    snapshot.follow(base.give_up())
    snapshot.take(tensors)
    encoding = Encoding(snapshot.tensors, described, found=snapshot.fetch())
    encoding.work()
    return encoding.result()


def bits(tensors: tuple[NamedTensor, ...]) -> list[tuple[str, bytes]]:
    return [(tensor.name, bytes(tensor.data)) for tensor in tensors]


@pytest.mark.parametrize("device", DEVICES)
def test_snapshots_that_follow_each_other_are_those_of_who_copies_all(device: str) -> None:
    draw = torch.Generator().manual_seed(1)
    weights: dict[str, Any] = {
        "large": torch.randn(700, 1000, generator=draw).to(torch.bfloat16).to(device),
        "turned": torch.randn(900, 500, generator=draw).to(device).T,
        "norm": torch.randn(64, generator=draw).to(device),
        "scalar": torch.tensor(3.0, device=device),
        "empty": torch.zeros(0, 4, device=device),
        "elsewhere": np.ones(5, "f4"),
    }
    ours, theirs = [TensorSnapshot(), TensorSnapshot()], [TensorSnapshot(), TensorSnapshot()]
    described: Described | None = None
    for number in range(5):
        keeper = KeptTensors(lambda: iter(weights.items()), device)
        found = take(ours[number % 2], keeper, ours[1 - number % 2], described)
        copied = take(theirs[number % 2], weights, theirs[1 - number % 2], described)
        assert found == copied
        assert bits(ours[number % 2].tensors) == bits(theirs[number % 2].tensors)
        described = Described(theirs[number % 2].tensors, copied.entries)
        for tensor in weights.values():
            if isinstance(tensor, Tensor) and tensor.numel():
                tensor[torch.rand(tensor.shape, generator=draw).to(device) < 0.03] *= 1.01


def test_what_has_another_shape_dtype_or_device_is_not_followed_and_what_lies_elsewhere_not_kept() -> None:
    base = torch.zeros(8, 8)
    for other in (base[:4], base.double(), base.to("meta"), base.view(64)):
        assert not KeptTensor(base).follow(other)
    for elsewhere in (base.to("meta"), np.zeros(3)):
        assert KeptTensors(list, "cpu").keep(elsewhere) is None


def test_a_gpu_without_memory_keeps_and_follows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    kept = KeptTensor(torch.zeros(8))
    monkeypatch.setattr(gpu_changes, "_look", full)
    assert not kept.follow(torch.ones(8))
    monkeypatch.setattr(gpu_changes, "_units", full)
    assert KeptTensors(list, "cpu").keep(torch.ones(8)) is None


def test_there_is_room_where_twice_the_tensors_leave_a_tenth_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [("w", torch.zeros(100)), ("v", torch.zeros(25))]
    memory = SimpleNamespace(free=2000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (memory.free, 10_000))
    assert has_room(tensors, "cuda")
    memory.free = 1999
    assert not has_room(tensors, "cuda")
    assert not has_room(tensors, "cpu")
