"""Patches of tensors wherever they lie: those of the host's codec, with only the changes brought over."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ebbtide.errors import InvalidRequest
from ebbtide.trainer import gpu_changes
from ebbtide.trainer.gpu_changes import encode_changes
from ebbtide.weights import named_tensor
from ebbtide.weights.patch.layout import Kind
from ebbtide.weights.patch.tensor import apply_patch, encode_patch, read_patch

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


def on_host(base: Tensor, new: Tensor) -> list[bytes]:
    old, young = named_tensor("w", base), named_tensor("w", new)
    return list(encode_patch(old.dtype, old.data, young.data, TILE))


def applied(parts: list[bytes], base: Tensor) -> bytes:
    named = named_tensor("w", base)
    found = bytearray(named.data)
    apply_patch(read_patch(b"".join(parts), named.dtype, base.numel()), found)
    return bytes(found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("density", [0.0, 0.001, 0.03, 0.06, 0.9, 1.0])
def test_the_patch_is_the_one_that_the_host_makes(device: str, dtype: torch.dtype, density: float) -> None:
    base, new = pair(dtype, density)
    parts = list(encode_changes(base.to(device), new.to(device), TILE))
    assert parts == on_host(base, new)
    assert applied(parts, base) == bytes(named_tensor("w", new).data)


@pytest.mark.parametrize("device", DEVICES)
def test_tiles_that_changed_much_or_regularly_come_whole_among_others(device: str) -> None:
    base, new = pair(torch.bfloat16, 0.02, 10 * TILE // 2)
    new[2048:4096] = torch.randn(2048).to(torch.bfloat16)
    new.view(torch.int16)[6144:8192] = base.view(torch.int16)[6144:8192] ^ 8
    parts = list(encode_changes(base.to(device), new.to(device), TILE))
    assert parts == on_host(base, new)
    assert [Kind(part[1]) for part in parts[1:5]] == [Kind.SPARSE, Kind.PACKED, Kind.SPARSE, Kind.XOR]


def test_a_large_tensor_is_encoded_a_stride_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_changes, "_STRIDE", 3 * TILE)
    base, new = pair(torch.bfloat16, 0.03, 12_345)
    assert list(encode_changes(base, new, TILE)) == on_host(base, new)
    for part in (slice(0, 0), slice(1, 12_345), slice(4, 12_000)):
        assert list(encode_changes(base[part], new[part], TILE)) == on_host(base[part], new[part])


def test_only_changes_are_brought_to_the_host_where_few_units_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    brought = []

    def watch(units: Tensor) -> object:
        brought.append(units.numel() * units.element_size())
        return original(units)

    original = gpu_changes._host
    monkeypatch.setattr(gpu_changes, "_host", watch)
    base, new = pair(torch.bfloat16, 0.03)
    list(encode_changes(base, new, TILE))
    changes = int((base.view(torch.int16) != new.view(torch.int16)).sum())
    assert sum(brought) == changes * (4 + 2)


def mismatches() -> Iterator[tuple[Tensor, Tensor, str]]:
    base = torch.zeros(8, 8)
    yield base, base[:4], "new"
    yield base, base.double(), "new"
    yield base.T[1:], base.T[1:], "base"
    yield base.to(torch.complex64), base.to(torch.complex64), "new"


@pytest.mark.parametrize(("base", "new", "field"), list(mismatches()))
def test_tensors_that_do_not_match_are_refused(base: Tensor, new: Tensor, field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        list(encode_changes(base, new))
