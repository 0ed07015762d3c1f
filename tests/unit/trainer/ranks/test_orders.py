"""What travels between ranks comes out as it went in, or is refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from ebbtide.errors import InvalidRequest, NotFound
from ebbtide.run_client import RunFailed
from ebbtide.trainer.learning.local_learning import LocalLearning
from ebbtide.trainer.learning.training_batches import TrainingSample
from ebbtide.trainer.ranks import rank_group
from ebbtide.trainer.ranks.rank_group import (
    BeginOrder,
    ForgetOrder,
    Order,
    OverOrder,
    PublishOrder,
    RankFollower,
    RankZeroLearning,
    SaveOrder,
    TrainOrder,
    pack_order,
    pack_samples,
    unpack_order,
    unpack_samples,
)
from ebbtide.trainer.training_checkpoint import CheckpointError
from ebbtide.types.run import EnvironmentSpec, RunSpec, TrainerSpec


def sample(length: int, tail: int, advantage: float) -> TrainingSample:
    rng = np.random.default_rng(length)
    return TrainingSample(
        ids=rng.integers(0, 1 << 20, length),
        mask=rng.integers(0, 2, tail).astype(np.bool_),
        logprobs=rng.normal(size=tail).astype(np.float32),
        versions=rng.integers(0, 9, tail),
        advantage=advantage,
    )


SAMPLES = [sample(7, 4, 0.1), sample(3, 3, -2.5), sample(9, 1, 1 / 3)]


@pytest.mark.parametrize("samples", [SAMPLES, SAMPLES[:1], []])
def test_samples_come_out_bit_for_bit(samples: list[TrainingSample]) -> None:
    order = unpack_order(pack_order(TrainOrder(step=4, version=9, samples=pack_samples(samples))))
    assert isinstance(order, TrainOrder)
    found = unpack_samples(order.samples)
    assert len(found) == len(samples)
    for ours, theirs in zip(found, samples, strict=True):
        for name in ("ids", "mask", "logprobs", "versions"):
            one, other = getattr(ours, name), getattr(theirs, name)
            assert one.dtype == other.dtype
            assert np.array_equal(one, other)
        assert ours.advantage == theirs.advantage


def test_a_spec_comes_out_as_it_was() -> None:
    trainer = TrainerSpec(steps=3, learning_rate=1e-5, kl_coefficient=0.25)
    spec = RunSpec(name="run", model="model", environment=EnvironmentSpec(name="any"), trainer=trainer)
    for order in (
        BeginOrder(run_id="r", spec=spec, source="/model", keep_published=False),
        PublishOrder(),
        SaveOrder(directory="/folder"),
        ForgetOrder(),
        OverOrder(),
    ):
        assert unpack_order(pack_order(order)) == order


@pytest.mark.parametrize("data", [b"", b"\x80", msgspec.msgpack.encode({"type": "Boo"}), pack_order(OverOrder())[:-1]])
def test_what_is_no_order_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="no order came from rank 0"):
        unpack_order(data)


@pytest.mark.parametrize("name", ["ids", "mask", "logprobs", "versions", "advantages"])
def test_samples_of_the_wrong_length_are_refused(name: str) -> None:
    packed = pack_samples(SAMPLES)
    with pytest.raises(InvalidRequest, match="whose lengths do not match"):
        unpack_samples(msgspec.structs.replace(packed, **{name: getattr(packed, name)[:-1]}))


def test_an_error_of_another_rank_keeps_its_kind() -> None:
    from ebbtide.trainer.ranks.rank_group import answer, read_answer

    assert read_answer(answer(None)) is None
    for error in (RunFailed("bad"), CheckpointError("damaged"), NotFound("gone"), InvalidRequest("no", field="model")):
        found = read_answer(answer(error))
        assert type(found) is type(error)
        assert str(found) == str(error)


class NotedMemory:
    """Of a rank."""

    def __init__(self) -> None:
        self.parked = True

    def forget(self) -> None:
        self.parked = False


def test_what_all_ranks_parked_is_freed_at_the_end_of_a_run() -> None:
    """Not first when the next one begins: other trainers may have the host's memory."""
    first, second = RankZeroLearning.__new__(RankZeroLearning), LocalLearning.__new__(LocalLearning)
    first._memory, second._memory = NotedMemory(), NotedMemory()  # type: ignore[assignment]
    follower = RankFollower.__new__(RankFollower)
    follower._learning = second

    class Crew:
        @contextmanager
        def order(self, order: Order) -> Iterator[None]:
            assert isinstance(order, ForgetOrder)
            follower._move(order)
            yield

    first._crew = Crew()  # type: ignore[assignment]
    first.forget_parked()
    assert [one._memory.parked for one in (first, second)] == [False, False]  # type: ignore[union-attr]


def test_a_rank_loads_a_run_from_where_the_model_is_on_its_own_host(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Path] = []
    monkeypatch.setattr(rank_group, "TorchExchange", lambda **_: None)
    monkeypatch.setattr(rank_group, "same_folder", lambda source, model: Path("/own") / model / source.name)
    monkeypatch.setattr(rank_group, "LocalLearning", lambda spec, *, source, **_: loaded.append(source))
    world: Any = SimpleNamespace(device="cpu", settle=lambda: None)
    client: Any = None
    spec = RunSpec(name="r", model="owner/tiny", environment=EnvironmentSpec(name="e"))
    order = BeginOrder(run_id="r", spec=spec, source="/of-rank-0/snapshots/c", keep_published=True)
    rank_group.RankFollower(world, client)._obey(order)
    assert loaded == [Path("/own/owner/tiny/c")]
