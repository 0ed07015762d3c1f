"""Laws of placement and of the line, over many random fleets and queues, seeded."""

import random
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from ebbtide.coordinator.rules.placement import outsized, place
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout, RolloutQueue
from ebbtide.coordinator.rules.turn_routing import CachedPrefix, Prefixes
from ebbtide.coordinator.rules.worker_view import WorkerView, admits
from ebbtide.step_pacing import VersionBounds


def waiting(
    number: int,
    bounds: tuple[int, int] = (0, 0),
    *,
    length: int = 10,
    priority: int = 0,
    episode: str = "",
    rollout_id: str = "",
) -> QueuedRollout:
    return QueuedRollout(
        rollout_id=rollout_id or f"r{number}",
        episode_id=episode or f"e{number}",
        bounds=VersionBounds(*bounds),
        length=length,
        place=number,
        priority=priority,
    )


def worker(
    name: str, slots: int = 4, running: int = 0, version: int = 1, *, target: int | None = None, context: int = 100
) -> WorkerView:
    return WorkerView(
        session_id=name,
        slots=slots,
        running=running,
        installed=version,
        target=version if target is None else target,
        max_model_len=context,
    )


def cached(episode: str, *workers: str, tokens: int = 9, version: int = 1) -> Prefixes:
    return {episode: {one: CachedPrefix(version=version, tokens=tokens) for one in workers}}


@dataclass
class Case:
    line: list[QueuedRollout]
    workers: list[WorkerView]


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    workers = [
        worker(f"w{i}", slots := draw.randint(1, 6), draw.randint(0, slots), draw.randint(0, 4),
             target=draw.randint(1, 4), context=draw.choice([20, 50, 100]))
        for i in range(draw.randint(1, 6))
    ]  # fmt: skip
    line = RolloutQueue()
    for number in range(draw.randint(0, 40)):
        floor = draw.randint(0, 3)
        ceiling = draw.choice([0, draw.randint(max(floor, 1), 4)])
        one = waiting(number, (floor, ceiling), length=draw.choice([10, 30, 60, 120]), priority=draw.randint(0, 1))
        line.add(one)
    return Case(list(line), workers)


@pytest.mark.parametrize("seed", range(200))
def test_placement_keeps_its_laws(seed: Any) -> None:
    case = random_case(seed)
    placements = place(case.line, case.workers, {})
    by_id = {one.rollout_id: one for one in case.line}
    workers = {one.session_id: one for one in case.workers}
    given = [placement.rollout_id for placement in placements]
    assert len(set(given)) == len(given)
    load = {name: one.running for name, one in workers.items()}
    for rollout_id, name in placements:
        one, target = by_id[rollout_id], workers[name]
        load[name] += 1
        assert admits(one.bounds, target.installed)
        assert admits(one.bounds, target.target)
        assert one.length < target.max_model_len
    assert all(load[name] <= max(one.slots, one.running) for name, one in workers.items())
    # Work is conserved: whatever waits on could go nowhere.
    for one in case.line:
        if one.rollout_id not in given:
            assert not any(
                load[h.session_id] < h.slots
                and admits(one.bounds, h.installed)
                and admits(one.bounds, h.target)
                and one.length < h.max_model_len
                for h in case.workers
            )
    # And first in line is first served, among those that want the same.
    kinds: dict[object, bool] = {}
    for one in case.line:
        kind = (one.bounds, one.length)
        assert not (one.rollout_id in given and kinds.get(kind, False))
        kinds[kind] = kinds.get(kind, False) or one.rollout_id not in given


def test_placement_can_be_repeated() -> None:
    case = random_case(5)
    assert place(case.line, case.workers, {}) == place(case.line, case.workers, {})


def test_turns_go_home_while_there_is_room_and_elsewhere_when_there_is_none() -> None:
    workers = [worker("w1", slots=2, running=1), worker("w2", slots=8)]
    line = [waiting(1, episode="e"), waiting(2, episode="e")]
    assert place(line, workers, cached("e", "w1")) == [("r1", "w1"), ("r2", "w2")]


def test_the_emptiest_worker_is_chosen_by_share() -> None:
    workers = [worker("small", slots=2, running=1), worker("large", slots=10, running=4)]
    assert place([waiting(1)], workers, {}) == [("r1", "large")]


def given(
    line: list[QueuedRollout], workers: list[WorkerView], prefixes: Prefixes | None = None, **terms: Any
) -> dict[str, str]:
    return {one.rollout_id: one.session_id for one in place(line, workers, prefixes or {}, **terms)}


def better(one: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(one, **changes)


def test_the_fastest_worker_is_chosen_and_of_equals_the_emptiest() -> None:
    slow, fast = better(worker("slow", slots=64), rate=20.0), better(worker("fast", slots=64, running=40), rate=28.0)
    assert given([waiting(1)], [slow, fast]) == {"r1": "fast"}
    close = better(worker("close", slots=64), rate=27.9)  # less than a tenth apart is no difference
    assert given([waiting(1)], [fast, close]) == {"r1": "close"}


def test_a_worker_not_known_yet_is_taken_for_a_typical_one() -> None:
    known = better(worker("known", slots=8, running=4), rate=30.0)
    assert given([waiting(1)], [known, worker("new", slots=8)]) == {"r1": "new"}


def test_what_is_given_slows_a_worker_down_beyond_its_plateau() -> None:
    workers = [better(worker("a", slots=64, running=31), rate=30.0, plateau=32),
             better(worker("b", slots=64, running=31), rate=30.0, plateau=60)]  # fmt: skip
    placed = list(given([waiting(n) for n in range(30)], workers, pending_limit=lambda worker: worker.slots).values())
    assert placed.count("b") > placed.count("a") > 0


def test_pending_work_is_limited_and_the_rest_waits_for_whoever_is_next() -> None:
    workers = [better(worker("a", slots=64, running=20), pending=14), worker("b", slots=8)]
    assert sorted(given([waiting(n) for n in range(40)], workers).values()) == ["a"] * 2 + ["b"] * 8
    assert given([waiting(1)], [better(worker("a", slots=64, running=20), pending=16)]) == {}
    assert len(place([waiting(n) for n in range(40)], workers, {}, at_most=3)) == 3


def test_a_worker_on_which_nothing_has_started_takes_half_its_slots_at_once() -> None:
    idle, line = worker("a", slots=64), [waiting(n) for n in range(40)]
    assert len(given(line, [idle])) == 32
    assert len(given(line, [better(idle, running=20, pending=20)])) == 12
    assert len(given(line, [better(idle, running=20, pending=10)])) == 6  # a quarter once some have started
    assert len(given(line, [worker("small", slots=6)])) == 6


def test_a_move_goes_where_it_was_meant_to_and_comes_before_affinity() -> None:
    workers = [better(worker("s1"), worker_id="w1"), better(worker("s2", running=3), worker_id="w2"), worker("s3")]
    moved = better(waiting(1, episode="e"), prefer="w2")
    assert given([moved], workers, cached("e", "s1")) == {"r1": "s2"}
    assert given([moved], [workers[0], better(workers[1], running=4), workers[2]], cached("e", "s1")) == {"r1": "s1"}


@pytest.mark.parametrize("full", [False, True])
def test_an_avoided_worker_is_never_chosen_while_another_could_take_it(full: Any) -> None:
    """Even if that one is full now: it will have room again."""
    workers = [better(worker("s1"), worker_id="w1"), better(worker("s2", running=4 if full else 0), worker_id="w2")]
    one = better(waiting(1, episode="e"), avoid=frozenset({"w1"}), prefer="w1")
    assert given([one], workers, cached("e", "s1")) == ({} if full else {"r1": "s2"})


def test_a_rollout_that_must_avoid_all_that_could_take_it_avoids_none() -> None:
    one = better(waiting(1, length=60), avoid=frozenset({"w1"}))
    workers = [better(worker("s1"), worker_id="w1"), better(worker("s2", context=50), worker_id="w2")]
    assert given([one], workers) == {"r1": "s1"}


def test_suspects_of_poison_start_one_at_a_time_on_each_worker() -> None:
    line = [better(waiting(n), no_progress=1) for n in range(5)] + [waiting(9)]
    placed = given(line, [worker("a"), worker("b"), better(worker("c"), pending=1, running=1, probation=1)])
    assert set(placed) == {"r0", "r1", "r9"}
    assert {placed["r0"], placed["r1"]} == {"a", "b"}


@pytest.mark.alone
def test_a_long_line_is_placed_in_little_time() -> None:
    line = RolloutQueue()
    for number in range(65_536):
        line.add(waiting(number, (1, 1)))
    workers = [better(worker(f"w{n}", slots=64), rate=20.0 + n % 7, plateau=32) for n in range(100)]
    began = time.process_time()
    assert len(place(line, workers, {}, at_most=128)) == 128
    assert place(line, [worker(f"w{n}", version=2) for n in range(100)], {}) == []  # not all of the line is looked at
    assert time.process_time() - began < 0.05


def test_one_that_fits_nowhere_holds_up_nobody() -> None:
    line = [waiting(1, (5, 0)), waiting(2, length=500), waiting(3)]
    assert place(line, [worker("w1")], {}) == [("r3", "w1")]


def test_a_worker_on_its_way_to_another_version_takes_only_what_both_may_make() -> None:
    moving = worker("w1", version=1, target=3)
    assert place([waiting(1, (0, 1)), waiting(2, (3, 0)), waiting(3, (1, 3))], [moving], {}) == [("r3", "w1")]


@pytest.mark.parametrize(
    ("bounds", "version", "within"),
    [((0, 0), 0, False), ((0, 0), 1, True), ((2, 0), 1, False), ((0, 2), 2, True), ((0, 2), 3, False)],
)
def test_bounds_of_zero_are_none_and_version_zero_is_none(bounds: Any, version: Any, within: Any) -> None:
    assert admits(VersionBounds(*bounds), version) is within


def test_a_requeued_rollout_stands_where_it_stood() -> None:
    line = RolloutQueue()
    for number in (3, 1, 2):
        line.add(waiting(number))
    first = line.remove("r1")
    assert first is not None
    line.add(waiting(9))
    line.add(first)
    assert [one.rollout_id for one in line] == ["r1", "r2", "r3", "r9"]


def test_priority_comes_before_place_and_an_id_stands_once() -> None:
    line = RolloutQueue()
    line.add(waiting(1))
    line.add(waiting(2, priority=-1))
    line.add(waiting(7, rollout_id="r1"))
    assert [(one.rollout_id, one.place) for one in line] == [("r2", 2), ("r1", 7)]
    assert line.remove("zz") is None
    assert len(line) == 2
    assert "r1" in line
    assert line.bounds() == {VersionBounds(0, 0)}


def test_a_rollout_is_outsized_once_a_longer_context_had_time_to_come() -> None:
    line = [waiting(0, length=50), waiting(1, length=49), waiting(2, length=80)]

    def found(longest: int, *, manned: float = 0.0, now: float = 30.0) -> list[str]:
        return [one.rollout_id for one in outsized(line, longest, manned=manned, now=now, grace_s=30.0)]

    assert found(50) == ["r0", "r2"]  # one more token must fit
    assert found(100) == []
    assert found(50, now=29.9) == []
    assert found(50, manned=1.0) == []
    assert found(0, now=1e9) == []
    line = [msgspec.structs.replace(line[0], since=10.0)]
    assert found(50) == []
    assert found(50, now=40.0) == ["r0"]
    line = [msgspec.structs.replace(one, made=1) for one in (waiting(0, length=50), waiting(1, length=51))]
    assert found(50) == ["r0"], "a worker that left had room for the other one"


def test_a_worker_that_is_held_takes_only_what_nobody_else_has_room_for() -> None:
    held = msgspec.structs.replace(worker("held", slots=8), held=True)
    line = [waiting(number) for number in range(6)]
    placed = place(line, [held, worker("busy", slots=4, running=1)], {})
    assert [one.session_id for one in placed] == ["busy"] * 3 + ["held"] * 3
    line = [waiting(0, episode="e"), waiting(1)]
    assert [one.session_id for one in place(line, [held, worker("free")], cached("e", "held"))] == ["free"] * 2
    assert [one.session_id for one in place(line, [held], {})] == ["held"] * 2


def again(number: int, made: int, *, prompt: int = 1_000, group: int = 0) -> QueuedRollout:
    """A rollout whose worker was lost."""
    return msgspec.structs.replace(waiting(number, length=prompt + made), made=made, group=group)


def wide(name: str, **more: Any) -> WorkerView:
    return msgspec.structs.replace(worker(name, slots=64, context=100_000), **more)


def test_what_is_re_prefilled_is_spread_by_what_each_worker_can_read() -> None:
    lost = [again(number, 9_000) for number in range(12)]
    fleet = [
        wide("slow", prefill=5_000.0),
        wide("fast", prefill=10_000.0),
        wide("busy", prefill=10_000.0, unread=60_000),
    ]
    placed = [name for _, name in place(lost, fleet, {}, rest=lambda one: 100.0)]
    reads = {name: placed.count(name) for name in ("slow", "fast", "busy")}
    assert reads["fast"] == pytest.approx(2 * reads["slow"], abs=1)
    assert reads["busy"] <= reads["fast"] - 5


def test_those_with_most_to_come_are_read_first() -> None:
    lost = [again(number, made) for number, made in enumerate((500, 9_000, 2_000, 0))]
    placed = place(lost, [wide("a")], {}, rest=lambda one: 100.0 + one.made)
    assert [rollout for rollout, _ in placed][:3] == ["r1", "r2", "r0"]


def test_a_rollout_goes_back_beside_a_sibling_whose_prompt_need_not_be_read() -> None:
    fleet = [wide("a"), wide("b"), wide("c")]

    def beside(one: QueuedRollout) -> list[str]:
        return ["b"] if one.group == 7 else []

    def where(one: QueuedRollout, workers: list[WorkerView] = fleet) -> str:
        ((_, name),) = place([one], workers, {}, rest=lambda one: 100.0, siblings=beside)
        return name

    assert where(again(1, 500, group=7)) == "b"
    assert where(again(1, 500, group=8)) == "c"
    assert where(again(1, 0, group=7)) == "c"  # it was never read
    assert where(again(1, 500, prompt=100, group=7)) == "c"  # too short to matter
    late = [wide("a"), wide("b", unread=50_000), wide("c")]
    assert where(again(1, 500, group=7), late) == "c"  # it would be read later there than elsewhere


def test_a_rollout_prefers_a_context_with_room_for_all_that_it_will_probably_make() -> None:
    workers = [worker("long", running=3, context=200), worker("short", context=100)]
    queue = [waiting(0, length=90), waiting(1, length=20), waiting(2, length=80), waiting(3, length=120)]
    placed = dict(place(queue, workers, {}, rest=lambda _: 50.0))
    assert placed == {"r0": "long", "r1": "short", "r2": "short"}  # what is full keeps nobody waiting


def test_a_rollout_too_long_for_every_context_goes_where_it_can_begin() -> None:
    workers = [worker("long", running=3, context=120), worker("short", context=100)]
    assert dict(place([waiting(0, length=90)], workers, {}, rest=lambda _: 500.0)) == {"r0": "short"}
