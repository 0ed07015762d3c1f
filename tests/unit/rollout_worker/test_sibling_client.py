"""What an answer brings of siblings reaches the drafts by version, and the next stream says what is there."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ebbtide.rollout_worker.streams.sibling_client import SiblingClient
from ebbtide.types.tokens import pack_tokens
from ebbtide.v1 import fleet_pb2
from ebbtide.wire.sibling_columns import MOST_HELD, held_siblings
from tests.fakes.sibling_sink import RecordedSink


class KeptSink(RecordedSink):
    def __init__(self) -> None:
        super().__init__()
        self.added: list[tuple[str, int, str, int, list[int]]] = []

    def add(self, group_id: str, version: int, rollout_id: str, offset: int, token_ids: Sequence[int]) -> None:
        super().add(group_id, version, rollout_id, offset, token_ids)
        self.added.append((group_id, version, rollout_id, offset, list(token_ids)))


def opened(number: int, rollout_id: str, group_id: str = "g") -> fleet_pb2.OpenedSibling:
    group = fleet_pb2.SiblingGroup(run_id="r", group_id=group_id)
    return fleet_pb2.OpenedSibling(number=number, group=group, rollout_id=rollout_id)


def message(offset: int, versions: list[int], *, number: int = 1, **more: Any) -> fleet_pb2.Siblings:
    """Tokens of one sibling, whose ids say where they belong."""
    count = len(versions)
    tokens = pack_tokens(range(offset, offset + count), [-0.5] * count, np.array(versions))
    return fleet_pb2.Siblings(numbers=[number], offsets=[offset], counts=[count], tokens=tokens, **more)


def test_tokens_reach_the_drafts_by_version_from_their_offsets_on() -> None:
    sink = KeptSink()
    client = SiblingClient(sink)
    client.take(message(0, [3, 3, 4], opened=[opened(1, "a")]))
    client.take(message(3, [4, 5]))
    assert sink.added == [
        ("g", 3, "a", 0, [0, 1]), ("g", 4, "a", 2, [2]), ("g", 4, "a", 3, [3]), ("g", 5, "a", 4, [4]),
    ]  # fmt: skip


def test_the_next_stream_says_how_far_each_sibling_is_but_of_ended_groups() -> None:
    client = SiblingClient(RecordedSink())
    assert client.open() == []
    client.take(message(0, [1, 1], opened=[opened(1, "a")]))
    client.take(message(7, [1, 1], number=2, opened=[opened(2, "b", "h")]))
    assert held_siblings(client.open()) == {("r", "g"): {"a": 2}, ("r", "h"): {"b": 9}}
    client.take(fleet_pb2.Siblings(ended=[fleet_pb2.SiblingGroup(run_id="r", group_id="g")]))
    assert held_siblings(client.open()) == {("r", "h"): {"b": 9}}


def test_an_ended_group_may_come_back_in_the_same_message_from_the_start() -> None:
    sink = RecordedSink()
    client = SiblingClient(sink)
    client.take(message(0, [1, 1], opened=[opened(1, "a")]))
    ended = [fleet_pb2.SiblingGroup(run_id="r", group_id="g")]
    client.take(message(0, [1], number=2, opened=[opened(2, "a")], ended=ended))
    assert (sink.ended, sink.ids) == (["g"], {"g": {"a": [0]}})


def test_a_message_that_cannot_be_read_costs_drafts_alone() -> None:
    sink = RecordedSink()
    client = SiblingClient(sink)
    client.take(message(0, [1], number=9))
    client.take(fleet_pb2.Siblings(numbers=[1], offsets=[0], counts=[2], opened=[opened(1, "a")]))
    client.take(fleet_pb2.Siblings(numbers=[1, 2], offsets=[0], counts=[1]))
    assert sink.ids == {}
    client.take(message(0, [1], opened=[opened(1, "a")]))
    assert sink.ids == {"g": {"a": [0]}}


def test_it_never_says_more_than_a_coordinator_takes() -> None:
    client = SiblingClient(RecordedSink())
    for group in range(5):
        for first in range(0, MOST_HELD // 4, 1024):
            names = [f"{group}.{first + one}" for one in range(1024)]
            tokens = pack_tokens([0] * 1024, [-0.5] * 1024, 1)
            numbers = range(group << 20 | first, (group << 20 | first) + 1024)
            some = [opened(number, name, f"g{group}") for number, name in zip(numbers, names, strict=True)]
            columns = {"numbers": numbers, "offsets": [0] * 1024, "counts": [1] * 1024}
            client.take(fleet_pb2.Siblings(opened=some, tokens=tokens, **columns))  # type: ignore[arg-type] # by name
    held = held_siblings(client.open())
    assert [len(ends) for ends in held.values()] == [4096, 4096, 4096, 4092]
    assert sum(len(ends) + 1 for ends in held.values()) == MOST_HELD
