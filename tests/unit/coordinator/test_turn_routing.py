"""Turns go to the worker with their prefix, within bounds on load and on time."""

from typing import Any

import pytest
from msgspec.structs import replace

from ebbtide.coordinator.rules.placement import place
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout, RolloutQueue
from ebbtide.coordinator.rules.turn_routing import TERMS, CachedPrefix, CachedPrefixes, Prefixes
from ebbtide.coordinator.rules.worker_view import WorkerView
from ebbtide.step_pacing import VersionBounds

#: Tokens that take a second to read, by the costs that rules assume.
SECOND = 5_000
PLAIN = replace(TERMS, reading=1.0)


def turn(number: int, *, episode: str = "e", length: int = SECOND, since: float = 0.0, made: int = 0) -> QueuedRollout:
    return QueuedRollout(
        rollout_id=f"r{number}", episode_id=episode, bounds=VersionBounds(0, 0), length=length, place=number,
        since=since, made=made,
    )  # fmt: skip


def worker(name: str, running: int = 0, *, slots: int = 32, rate: float = 30.0, **more: Any) -> WorkerView:
    terms = {"installed": 1, "target": 1, "max_model_len": 100_000, "plateau": 8, **more}
    return WorkerView(session_id=name, worker_id=name, slots=slots, running=running, rate=rate, **terms)


def known(*workers: str, episode: str = "e", tokens: int = SECOND, version: int = 1) -> Prefixes:
    return {episode: {one: CachedPrefix(version=version, tokens=tokens) for one in workers}}


def placed(
    queue: list[QueuedRollout], workers: list[WorkerView], prefixes: Prefixes, *, rest: float = 100.0, now: float = 0.0
) -> dict[str, str]:
    return dict(place(queue, workers, prefixes, rest=lambda _: rest, now=now, terms=PLAIN))


def test_a_turn_stays_with_its_prefix_though_another_worker_is_a_little_faster() -> None:
    workers = [worker("home", 10, rate=25.0), worker("other", rate=30.0)]
    assert placed([turn(1)], workers, known("home"), rest=100_000.0) == {"r1": "home"}


def test_a_long_turn_leaves_a_slow_worker_and_a_short_one_does_not() -> None:
    workers = [worker("home", 10, rate=10.0), worker("other", rate=30.0)]
    assert placed([turn(1)], workers, known("home"), rest=10_000.0) == {"r1": "other"}
    assert placed([turn(1)], workers, known("home"), rest=10.0) == {"r1": "home"}


def test_what_reading_a_prefix_costs_counts_for_all_that_run_beside_it() -> None:
    home = worker("home", 4, rate=10.0)
    few, many = worker("other", 1, rate=30.0), worker("other", 20, rate=30.0)
    assert placed([turn(1)], [home, few], known("home"), rest=100.0) == {"r1": "other"}
    assert placed([turn(1)], [home, many], known("home"), rest=100.0) == {"r1": "home"}


def test_reading_costs_what_a_typical_worker_was_seen_to_need_for_it() -> None:
    home = worker("home", 4, rate=10.0)
    for prefill, chosen in ((0.0, "other"), (20.0 * SECOND, "other"), (SECOND / 20.0, "home")):
        assert placed([turn(1)], [home, worker("other", 1, prefill=prefill)], known("home")) == {"r1": chosen}
    full = worker("home", 32)
    for prefill, waits in ((SECOND, True), (10.0 * SECOND, False)):
        found = placed([turn(1)], [full, worker("other", 1, prefill=prefill)], known("home"), now=1.0)
        assert found == ({} if waits else {"r1": "other"})


@pytest.mark.parametrize("speeds", [(50.0, 50.0), (1.0, 99.0), (99.0, 1.0)])
def test_one_workers_reading_against_anothers_moves_no_turn(speeds: tuple[float, float]) -> None:
    """The two workers are typical together, whichever of them reads faster: a turn goes where it is made faster."""
    home = worker("home", 4, rate=10.0, prefill=speeds[0] * SECOND)
    other = worker("other", 4, rate=30.0, prefill=speeds[1] * SECOND)
    assert placed([turn(1, length=3 * SECOND)], [home, other], known("home")) == {"r1": "other"}


def test_what_is_re_prefilled_counts_three_times() -> None:
    workers, bound_s = [worker("home", 32), worker("other", 1)], 3.0 * (1 + 1)
    for now, found in ((0.9 * bound_s, []), (1.1 * bound_s, [("r1", "other")])):
        assert place([turn(1)], workers, known("home"), now=now) == found


def test_of_several_workers_with_a_part_of_the_prefix_the_one_with_most_is_chosen() -> None:
    prefixes = {"e": {"some": CachedPrefix(1, 1_000), "most": CachedPrefix(1, 4_000), "less": CachedPrefix(1, 2_000)}}
    workers = [worker(name, 2) for name in ("less", "most", "other", "some")]
    assert placed([turn(1)], workers, prefixes) == {"r1": "most"}


def test_other_weights_than_those_that_read_it_make_a_prefix_worthless() -> None:
    workers = [worker("home", 20, rate=20.0), worker("other", rate=30.0)]
    assert placed([turn(1)], workers, known("home", version=2)) == {"r1": "other"}


def test_a_turn_waits_for_its_full_worker_no_longer_than_reading_its_prefix_again_would_cost() -> None:
    workers = [worker("home", 32), worker("other", 1)]
    bound_s = 1.0 * (1 + 1)  # a second of reading, for itself and the one beside it
    assert placed([turn(1)], workers, known("home"), now=0.9 * bound_s) == {}
    assert placed([turn(1)], workers, known("home"), now=1.1 * bound_s) == {"r1": "other"}
    assert placed([turn(1, length=100)], workers, known("home", tokens=100), now=0.9 * bound_s) == {"r1": "other"}


def test_no_prefix_makes_a_turn_wait_for_longer_than_the_bound() -> None:
    workers = [worker("home", 32), worker("other", 31)]
    one, prefixes = turn(1, length=99_000), known("home", tokens=99_000)
    assert placed([one], workers, prefixes, now=0.9 * TERMS.wait_most_s) == {}
    assert placed([one], workers, prefixes, now=TERMS.wait_most_s) == {"r1": "other"}


@pytest.mark.parametrize("state", ["shut", "held", "avoided", "gone"])
def test_a_turn_waits_for_no_worker_that_cannot_take_it(state: str) -> None:
    home = worker("home", 32, shut=state == "shut", held=state == "held")
    one = replace(turn(1), avoid=frozenset({"home"} if state == "avoided" else ()))
    workers = [worker("other")] if state == "gone" else [home, worker("other")]
    assert placed([one], workers, known("home")) == {"r1": "other"}


def test_while_a_turn_waits_others_take_the_free_places() -> None:
    queue = RolloutQueue()
    for one in (turn(1), turn(2, episode="new"), turn(3, episode="there")):
        queue.add(one)
    prefixes = {**known("home"), **known("other", episode="there")}
    workers = [worker("home", 32), worker("other", 8)]
    assert dict(place(queue, workers, prefixes, now=0.1)) == {"r2": "other", "r3": "other"}


def test_only_so_many_turns_wait_in_a_round() -> None:
    queue = [turn(number, episode=f"e{number}") for number in range(TERMS.waiting_most + 50)]
    prefixes = {one.episode_id: {"home": CachedPrefix(1, SECOND)} for one in queue}
    workers = [worker("home", 32), worker("other", slots=1_000, plateau=1_000)]
    found = place(queue, workers, prefixes, now=0.1, pending_limit=lambda _: 1_000)
    assert len(found) == 50


def test_a_turn_that_was_moved_goes_where_it_was_moved_to() -> None:
    one = replace(turn(1), prefer="other")
    assert placed([one], [worker("home"), worker("other", 20)], known("home")) == {"r1": "other"}


def test_a_likely_reclaim_speaks_against_a_borrowed_worker() -> None:
    lent = worker("home", 4, rate=15.0, borrowed=True, share=1.0, spell_s=0.5)
    steady = worker("other", 4, rate=30.0)
    one, prefixes = turn(1, length=20_000), known("home", tokens=20_000)
    assert placed([one], [lent, steady], prefixes, rest=450.0) == {"r1": "home"}
    assert placed([one], [lent, steady], prefixes, rest=900.0) == {"r1": "other"}


def test_the_last_workers_of_an_episode_are_remembered_until_it_ends() -> None:
    book = CachedPrefixes()
    assert book.began("e", "s1", version=1, tokens=100) == 0
    book.left("e", 150)
    assert book.began("e", "s1", version=1, tokens=200) == 150
    assert book.began("e", "s2", version=1, tokens=300) == 0
    book.left("e", 350)
    assert book.by_episode["e"] == {"s1": CachedPrefix(1, 200), "s2": CachedPrefix(1, 350)}
    assert book.began("e", "s1", version=2, tokens=400) == 0
    for number in range(20):
        book.began("e", f"t{number}", version=2, tokens=500)
    assert len(book.by_episode["e"]) == 8
    book.forget("e")
    book.left("e", 10)
    assert book.by_episode == {}
