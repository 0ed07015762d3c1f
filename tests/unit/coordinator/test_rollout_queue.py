"""Laws of one run's line: groups that began, and evaluation beside training."""

from collections import Counter

import msgspec
import pytest

from ebbtide.coordinator.rules.rollout_queue import PARTS, QueuedRollout, RolloutQueue
from ebbtide.step_pacing import VersionBounds
from ebbtide.types.run import SlotPriority


def waiting(
    name: str, place: int, *, group: int = 0, evaluation: bool = False, priority: int = 0, request: bool = False,
    interactive: bool = False,
) -> QueuedRollout:  # fmt: skip
    return QueuedRollout(
        rollout_id=name,
        episode_id=name,
        bounds=VersionBounds(0, 0),
        length=1,
        place=place,
        group=group or place,
        evaluation=evaluation,
        priority=priority,
        request=request,
        interactive=interactive,
    )


def order(line: RolloutQueue) -> list[str]:
    return [one.rollout_id for one in line]


def test_a_later_turn_goes_where_its_group_stood() -> None:
    line = RolloutQueue()
    for name, place, group in (("g1.a", 1, 1), ("g2.a", 2, 2), ("g3.a", 3, 3), ("g1.turn2", 9, 1), ("g2.retry", 8, 2)):
        line.add(waiting(name, place, group=group))
    assert order(line) == ["g1.a", "g1.turn2", "g2.a", "g2.retry", "g3.a"]


def test_a_group_of_a_step_that_is_due_later_stands_behind_however_old_it_is() -> None:
    line = RolloutQueue()
    line.add(waiting("old", 1, priority=4))
    line.add(waiting("due", 2, priority=3))
    assert order(line) == ["due", "old"]


def test_no_group_starves_behind_later_ones_that_go_on_and_on() -> None:
    """Each placed rollout brings another turn of its group: the oldest group still ends first."""
    line, ended, place = RolloutQueue(), list[int](), 100
    turns = Counter[int]()
    for group in range(1, 11):
        line.add(waiting(f"g{group}.0", group, group=group))
    while len(line):
        first = next(iter(line))
        line.take(first.rollout_id)
        turns[first.group] += 1
        if turns[first.group] == 5:
            ended.append(first.group)
            continue
        place += 1
        line.add(waiting(f"g{first.group}.{place}", place, group=first.group))
    assert ended == list(range(1, 11))


@pytest.mark.parametrize("setting", sorted(PARTS))
def test_evaluation_and_training_take_turns_by_their_parts_where_both_wait(setting: SlotPriority) -> None:
    line = RolloutQueue(setting)
    for number in range(400):
        line.add(waiting(f"t{number}", number))
        line.add(waiting(f"e{number}", 1000 + number, evaluation=True, priority=-1))
    taken = Counter[bool]()
    for _ in range(80):  # one place at a time, as slots come free
        one = line.take(next(iter(line)).rollout_id)
        assert one is not None
        taken[one.evaluation] += 1
    assert taken[True] == pytest.approx(80 * PARTS[setting], abs=1)


@pytest.mark.parametrize("setting", sorted(PARTS))
def test_many_places_at_once_are_shared_as_single_ones_are(setting: SlotPriority) -> None:
    line = RolloutQueue(setting)
    for number in range(100):
        line.add(waiting(f"t{number}", number))
        line.add(waiting(f"e{number}", 1000 + number, evaluation=True))
    first = order(line)[:40]
    assert sum(name[0] == "e" for name in first) == pytest.approx(40 * PARTS[setting], abs=1)
    assert sorted(order(line)) == sorted(
        [f"t{number}" for number in range(100)] + [f"e{number}" for number in range(100)]
    )


def test_a_kind_that_waits_alone_has_all_places_and_the_other_saves_nothing_up() -> None:
    line = RolloutQueue(SlotPriority.BEFORE)
    for number in range(50):
        line.add(waiting(f"t{number}", number))
    for number in range(40):
        assert line.take(f"t{number}") is not None
    for number in range(50):
        line.add(waiting(f"e{number}", 100 + number, evaluation=True))
    assert "t40" in order(line)[:5]


def test_a_rollout_that_leaves_without_a_place_has_had_no_turn() -> None:
    line = RolloutQueue(SlotPriority.SHARED)
    for number in range(4):
        line.add(waiting(f"t{number}", number))
        line.add(waiting(f"e{number}", 100 + number, evaluation=True))
    line.remove("e0")
    assert order(line)[0] == "e1"
    assert line.take("zz") is None


def test_interactive_requests_go_before_all_others_and_those_by_priority_and_age() -> None:
    line = RolloutQueue()
    line.add(waiting("old", 1, request=True))
    line.add(waiting("urgent", 2, request=True, priority=-1))
    line.add(waiting("chat.b", 4, request=True, interactive=True, priority=3))
    line.add(waiting("chat.a", 3, request=True, interactive=True, priority=3))
    assert order(line) == ["chat.a", "chat.b", "urgent", "old"]


@pytest.mark.parametrize("setting", sorted(PARTS))
def test_requests_take_turns_with_all_other_rollouts_by_their_part(setting: SlotPriority) -> None:
    """Training and evaluation share what is left as they would without requests."""
    line = RolloutQueue(SlotPriority.SHARED, setting)
    for number in range(400):
        line.add(waiting(f"t{number}", number))
        line.add(waiting(f"e{number}", 1000 + number, evaluation=True))
        line.add(waiting(f"r{number}", 2000 + number, request=True, interactive=number % 2 == 0))
    foreseen = [name[0] for name in order(line)[:160]]
    taken = [one.rollout_id[0] for _ in range(160) if (one := line.take(next(iter(line)).rollout_id))]
    assert taken == foreseen
    count = Counter(taken)
    assert count["r"] == pytest.approx(160 * PARTS[setting], abs=1)
    assert count["t"] == pytest.approx(count["e"], abs=1)


def test_requests_that_come_after_a_pause_have_saved_nothing_up() -> None:
    line = RolloutQueue(SlotPriority.BEFORE, SlotPriority.SHARED)
    for number in range(50):
        line.add(waiting(f"t{number}", number))
    line.add(waiting("r0", 100, request=True))
    for _ in range(40):
        line.take(next(iter(line)).rollout_id)
    for number in range(1, 20):
        line.add(waiting(f"r{number}", 100 + number, request=True))
    assert sum(name[0] == "r" for name in order(line)[:10]) == pytest.approx(5, abs=1)


def test_a_line_takes_over_the_members_of_another() -> None:
    line, other = RolloutQueue(), RolloutQueue()
    line.add(waiting("former", 1))
    for n in range(50):
        other.add(waiting(f"r{n}", n * 7 % 50, group=n % 9, evaluation=n % 5 == 0, request=n % 7 == 0))
    there = order(other)
    line.replace(other)
    assert order(line) == there
    assert all(line.remove(rollout_id) for rollout_id in there)
    assert not line


def test_the_rollouts_of_a_length_or_more_are_found_in_the_order_of_the_line() -> None:
    line = RolloutQueue()
    for number in range(5):
        line.add(msgspec.structs.replace(waiting(f"r{number}", number), length=10 * number))
    assert [one.rollout_id for one in line.not_shorter(30)] == ["r3", "r4"]
    line.remove("r4")
    assert line.not_shorter(35) == []
    line.replace(RolloutQueue())
    assert line.not_shorter(1) == []
