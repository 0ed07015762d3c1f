"""Copies of tensors: of the bits as they are, in memory that is used again, and no more of it than they need."""

import gc
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ebbtide.client.publisher import tensor_snapshots
from ebbtide.client.publisher.tensor_snapshots import TensorSnapshot
from ebbtide.errors import InvalidRequest
from ebbtide.trainer.learning.gpu_changes import KeptTensors
from ebbtide.weights import as_array, named_tensor


def model(value: float, size: int = 300_000) -> dict[str, Any]:
    return {"a": torch.full((size // 100, 100), value), "b": np.full(7, value), "c": torch.tensor(value)}


def values(snapshot: TensorSnapshot) -> list[float]:
    return [float(as_array(tensor).reshape(-1)[-1]) for tensor in snapshot.tensors]


def test_a_copy_stays_as_it_was_and_the_next_takes_its_memory() -> None:
    snapshot, weights = TensorSnapshot(), model(1.0)
    snapshot.take(weights)
    addresses = [as_array(tensor).ctypes.data for tensor in snapshot.tensors]
    weights["a"].fill_(2.0)
    assert values(snapshot) == [1.0] * 3
    snapshot.take(model(3.0))
    assert values(snapshot) == [3.0] * 3
    assert [as_array(tensor).ctypes.data for tensor in snapshot.tensors] == addresses
    snapshot.take(list(model(4.0).items())[:1])
    assert values(snapshot) == [4.0]


def test_no_more_memory_is_taken_than_the_tensors_have_and_room_made_before_is_used() -> None:
    size = 4_000_000
    weights = {f"w{i}": np.zeros(size // 8, "f4") for i in range(8)}
    tracemalloc.start()
    try:
        first, second = TensorSnapshot(), TensorSnapshot()
        first.take(weights)
        second.make_room(first.room)
        gc.collect()
        tracemalloc.reset_peak()
        second.take(weights)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2.02 * size * 4


def test_ranks_that_are_not_the_first_take_pieces_alone() -> None:
    piece = named_tensor("piece", np.ones(2))
    pieces = {"start": (0,), "full": (4,)}
    halves = type(piece)(name="piece", dtype="F64", shape=(2,), data=piece.data, **pieces)
    snapshot = TensorSnapshot()
    snapshot.take([halves, ("whole", np.ones(3)), named_tensor("other", np.ones(3))], first=False)
    assert [(tensor.name, tensor.full) for tensor in snapshot.tensors] == [("piece", (4,))]


@pytest.mark.parametrize("refused", [False, True])
def test_a_gpus_tensors_are_copied_into_locked_pages_and_waited_for(
    refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU here: its runtime is told to, and what it was told is looked at. It keeps its last error for a kernel.

    Pages are locked and unlocked with the tensor's own device selected, whose name is `cpu` here: never with a thread's
    first one, which may be another rank's.
    """
    told: list[tuple[str, Any]] = []
    errors: list[str] = []
    selected = ["cuda:0"]  # a thread's first device

    @contextmanager
    def select(device: str) -> Iterator[None]:
        selected.append(device)
        yield
        selected.pop()

    def register(address: int, size: int, flags: int) -> int:
        told.append(("lock", selected[-1]))
        errors.extend(["no such pages"] * refused)
        return int(refused)

    def kernel(_size: int, *, device: str) -> None:
        if errors:
            raise RuntimeError(f"{device}: {errors.pop()}")

    runtime = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda address: told.append(("unlock", selected[-1]))
    )
    monkeypatch.setattr(torch.cuda, "device", select)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", kernel)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: told.append(("wait", str(device))))
    monkeypatch.setattr(tensor_snapshots, "_on_gpu", lambda value: isinstance(value, torch.Tensor))
    large = torch.arange(100_000.0).to(torch.bfloat16)
    snapshot = TensorSnapshot()
    for number in range(2):
        told.clear()
        snapshot.take({"large": large + number, "turned": large.reshape(100, 1000).T, "small": torch.tensor(number)})
        assert (told[0], told[-1]) == (("wait", "cpu"), ("wait", "cpu"))
        assert [device for what, device in told if what == "lock"] == ([] if number else ["cpu", "cpu"])
        found = [bytes(tensor.data) for tensor in snapshot.tensors]
        assert found[0] == bytes(named_tensor("w", large + number).data)
        assert found[1] == bytes(named_tensor("w", large.reshape(100, 1000).T).data)
        assert [tensor.shape for tensor in snapshot.tensors] == [(100_000,), (1000, 100), ()]
        assert [tensor.dtype for tensor in snapshot.tensors] == ["BF16", "BF16", "I64"]
        assert not errors
    told.clear()
    del snapshot
    gc.collect()
    assert told == ([] if refused else [("unlock", "cpu")] * 2)


@pytest.mark.parametrize("kept", [False, True])
def test_a_gpus_tensor_that_cannot_be_read_is_named(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(tensor_snapshots, "_on_gpu", lambda value: isinstance(value, torch.Tensor))
    weights = {"good": torch.ones(3), "sparse": torch.eye(3).to_sparse()}
    with pytest.raises(InvalidRequest, match="sparse: its elements cannot be read") as refusal:
        TensorSnapshot().take(KeptTensors(weights.items, "cpu") if kept else weights)
    assert refusal.value.field == "sparse"


def test_who_has_no_torch_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    snapshot = TensorSnapshot()
    snapshot.take({"w": np.ones(3, "f4")})
    assert values(snapshot) == [1.0]


def test_what_is_no_tensor_is_refused() -> None:
    for tensors in (["w"], [("w",)], [(1, np.ones(2))], [np.ones(2)]):
        with pytest.raises(InvalidRequest, match="must be NamedTensors or pairs"):
            TensorSnapshot().take(tensors)  # type: ignore[arg-type]
