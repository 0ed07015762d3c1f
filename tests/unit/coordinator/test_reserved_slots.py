"""Slots that are reserved for interactive rollouts: how many, and that no other rollout takes them."""

import random

import msgspec
import pytest

from ebbtide.coordinator.dispatch.dispatch_round import ASKED_LATELY_S, reserved_slots
from ebbtide.coordinator.rules.placement import place
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout, RolloutQueue
from tests.unit.coordinator.test_placement import waiting, worker


def asked(number: int) -> QueuedRollout:
    return msgspec.structs.replace(waiting(number), request=True, interactive=True)


def queue(*members: QueuedRollout) -> RolloutQueue:
    made = RolloutQueue()
    for one in members:
        made.add(one)
    return made


@pytest.mark.parametrize(
    ("total", "running", "asked_s", "kept"),
    [
        (64, 0, 0.0, 2),
        (64, 1, 0.0, 1),
        (64, 5, 0.0, 0),  # they have slots already
        (8, 0, 0.0, 1),  # at most an eighth
        (7, 0, 0.0, 0),
        (64, 0, ASKED_LATELY_S + 1, 0),
        (64, 0, float("inf"), 0),  # nobody ever asked
    ],
)
def test_few_slots_are_kept_and_only_while_people_ask(total: int, running: int, asked_s: float, kept: int) -> None:
    assert reserved_slots(total, running, most=2, asked_s=asked_s) == kept


def test_batch_rollouts_leave_reserved_slots_and_an_interactive_one_behind_them_takes_one() -> None:
    line = queue(*(waiting(number) for number in range(10)), asked(20))
    placed = [one.rollout_id for one in place(line, [worker("a", slots=6, running=2)], {}, batch_slots=2)]
    assert sorted(placed) == ["r0", "r1", "r20"]


def test_without_an_interactive_rollout_reserved_slots_stay_free() -> None:
    line = queue(*(waiting(number) for number in range(10)))
    assert len(place(line, [worker("a", slots=6)], {}, batch_slots=4)) == 4
    assert place(line, [worker("a", slots=6)], {}, batch_slots=0) == []


def test_no_rollout_is_placed_twice_and_batch_rollouts_never_take_more_than_their_part() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        line = queue(*((asked if draw.random() < 0.3 else waiting)(number) for number in range(draw.randrange(30))))
        workers = [worker(f"w{number}", slots=8, running=draw.randrange(9)) for number in range(3)]
        free, most = sum(8 - one.running for one in workers), draw.randrange(12)
        people = {one.rollout_id for one in line if one.interactive}
        placed = [one.rollout_id for one in place(line, workers, {}, pending_limit=lambda _: 99, batch_slots=most)]
        batch = [name for name in placed if name not in people]
        assert len(set(placed)) == len(placed) <= free
        assert len(batch) <= most
        if len(batch) < len(line) - len(people) and most >= free:
            assert len(placed) == min(free, len(line))
        if free:
            assert len(placed) - len(batch) >= min(len(people), free - len(batch))
