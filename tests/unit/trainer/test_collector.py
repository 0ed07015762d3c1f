"""Whole groups in a fixed order, and every trajectory told exactly once."""

import random

import pytest

from ebbtide.trainer.collectors import ConsumedTrajectory, TrajectoryCollector, staleness
from ebbtide.types.rollout import Trajectory
from ebbtide.types.tokens import pack_ids, pack_tokens

STEPS = {1: 0, 2: 1, 3: 2}


def trajectory(
    name: str, *, step: int = 0, size: int = 2, versions: tuple[int, ...] = (1,), cursor: str = ""
) -> Trajectory:
    count = len(versions)
    return Trajectory(
        episode_id=name,
        group_id=name.rpartition(".")[0],
        step=step,
        group_size=size,
        prompt_ids=pack_ids([1]),
        tokens=pack_tokens([5] * count, [-1.0] * count, list(versions)),
        loss_mask=b"\x01" * count,
        reward=0.0,
        cursor=cursor or name,
    )


def test_the_order_of_a_batch_does_not_depend_on_the_order_of_arrival() -> None:
    names = [f"g{group}.{sample}" for group in range(3) for sample in range(2)]
    orders = set()
    for seed in range(10):
        random.Random(seed).shuffle(names)
        collector = TrajectoryCollector(step=0, max_staleness=0)
        for name in names:
            collector.add(trajectory(name))
        assert collector.whole_groups() == 3
        orders.add(tuple(one.episode_id for one in collector.take(STEPS)))
    assert orders == {tuple(sorted(names))}


def test_a_group_is_whole_once_all_that_it_states_are_there_and_repeats_do_not_count() -> None:
    collector = TrajectoryCollector(step=0, max_staleness=0)
    for name in ("g0.0", "g0.0", "g1.0"):
        collector.add(trajectory(name))
    assert collector.whole_groups() == 0
    collector.add(trajectory("g0.1", size=1))
    assert collector.whole_groups() == 1


def test_what_is_too_stale_late_or_incomplete_is_dropped_with_its_reason() -> None:
    collector = TrajectoryCollector(step=1, max_staleness=0)
    collector.add(trajectory("late.0", step=0))
    collector.add(trajectory("g0.0", step=1, versions=(2, 2)))
    collector.add(trajectory("g0.1", step=1, versions=(1, 2)))
    collector.add(trajectory("g1.0", step=1, versions=(2,)))
    collector.add(trajectory("g2.0", step=1, size=1, versions=(9,)))
    assert [one.episode_id for one in collector.take(STEPS)] == ["g0.0"]
    assert {item.episode_id: item.drop_reason for item in collector.uncommitted} == {
        "late.0": "too_stale",
        "g0.0": "",
        "g0.1": "too_stale",
        "g1.0": "group_incomplete",
        "g2.0": "too_stale",
    }


def test_steps_ahead_wait_for_their_turn() -> None:
    collector = TrajectoryCollector(step=0, max_staleness=1)
    collector.add(trajectory("b.0", step=1, size=1))
    assert collector.whole_groups() == 0
    collector.add(trajectory("a.0", step=0, size=1))
    assert [one.episode_id for one in collector.take(STEPS)] == ["a.0"]
    assert [one.episode_id for one in collector.take(STEPS)] == ["b.0"]


@pytest.mark.parametrize("seed", range(20))
def test_a_restart_from_any_point_sees_every_trajectory_once(seed: int) -> None:
    """`stream` stands for the coordinator: what was not committed stays, in order, behind cursors that grow."""
    rng = random.Random(seed)
    names = [(f"s{step}.g{group}.{sample}", step) for step in range(4) for group in range(2) for sample in range(2)]
    rng.shuffle(names)
    names.sort(key=lambda item: item[1] + rng.random() * 1.5)
    stream = [trajectory(name, step=step, cursor=f"{place:03d}") for place, (name, step) in enumerate(names)]
    told: list[str] = []
    taken: list[str] = []
    step, cursor = 0, ""
    consumed: tuple[ConsumedTrajectory, ...] = ()
    collector = TrajectoryCollector(step=0, max_staleness=9)
    for place, one in enumerate(stream):
        collector.add(one)
        if rng.random() < 0.3 and collector.whole_groups() == 2:
            taken += [item.episode_id for item in collector.take(STEPS)]
        if rng.random() < 0.3:  # a checkpoint, and a restart before or after what it holds was told
            step, consumed, cursor = collector.step, tuple(collector.uncommitted), collector.cursor()
            if rng.random() < 0.5:
                told += [item.cursor for item in consumed]
                collector.committed(len(consumed))
            collector = TrajectoryCollector(step=step, max_staleness=9, consumed=consumed, cursor=cursor)
            told += [item.cursor for item in consumed]
            collector.committed(len(consumed))
            for earlier in stream[: place + 1]:
                if earlier.cursor > cursor and earlier.cursor not in told:
                    collector.add(earlier)
    while collector.step < 4:
        assert collector.whole_groups() == 2
        taken += [item.episode_id for item in collector.take(STEPS)]
    told += [item.cursor for item in collector.uncommitted]
    assert sorted(taken) == sorted(name for name, _ in names)
    assert set(told) == {one.cursor for one in stream}
    assert collector.cursor() == stream[-1].cursor


@pytest.mark.parametrize("seed", range(10))
def test_groups_are_handed_out_whole_and_once_and_are_what_the_step_takes(seed: int) -> None:
    """Some members are stale, some groups incomplete, and some are completed again after they were handed out."""
    rng = random.Random(seed)
    names = [f"g{group}.{sample}" for group in range(8) for sample in range(3)]
    rng.shuffle(names)
    lost = {name for name in names if rng.random() < 0.1}
    collector, handed = TrajectoryCollector(step=2, max_staleness=1), list[str]()
    for name in names:
        if name not in lost:
            collector.add(trajectory(name, step=2, size=3, versions=rng.choice([(3,), (2, 3), (1, 3)])))
        if rng.random() < 0.5:
            part = [one.episode_id for one in collector.hand_out(STEPS)]
            assert not {one.partition(".")[0] for one in part} & {one.partition(".")[0] for one in handed}
            handed += part
            assert collector.new_groups() == 0
            if part:
                again = part[0].partition(".")[0] + ".again"
                collector.add(trajectory(again, step=2, size=3, versions=(3,)))
        assert not [item for item in collector.uncommitted if not item.drop_reason], "open until the step ends"
    handed += [one.episode_id for one in collector.hand_out(STEPS)]
    assert not collector.hand_out(STEPS)
    held = collector.cursor()
    taken = [one.episode_id for one in collector.take(STEPS)]
    assert (
        sorted(handed)
        == sorted(taken)
        == sorted(item.episode_id for item in collector.uncommitted if not item.drop_reason)
    )
    assert len(collector.uncommitted) == len({item.episode_id for item in collector.uncommitted})
    assert held == "", "a restart reads all of them again"
    assert collector.cursor()


def test_groups_of_later_steps_are_not_handed_out() -> None:
    collector = TrajectoryCollector(step=0, max_staleness=1)
    collector.add(trajectory("b.0", step=1, size=1))
    assert (collector.new_groups(), collector.hand_out(STEPS)) == (0, [])
    collector.take(STEPS)
    assert collector.new_groups() == 1
    assert [one.episode_id for one in collector.hand_out(STEPS)] == ["b.0"]


def test_staleness_counts_steps_and_not_version_numbers() -> None:
    one = trajectory("g.0", versions=(1, 7, 7, 7))
    assert staleness(one, 4, {1: 0, 7: 4}) == (1.0, 4)
