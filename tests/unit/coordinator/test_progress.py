"""Who has stopped making tokens, and who is only slow."""

import random
from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from ebbtide.coordinator.fleet.worker_health import CEILING_S, LATE_S, PAUSE_S, TokenProgress, WorkerActivity

_TICK_S = 0.25


def doing(started: int = 1, pending: int = 0, *, session: str = "a", **more: Any) -> WorkerActivity:
    return WorkerActivity(session=session, started=started, pending=pending, heard=0.0, **more)


def judge(watch: TokenProgress, what: WorkerActivity, now: float, **said: Any) -> list[str]:
    """Of a worker that was heard just now, if nothing else is said."""
    return watch.stalled([replace(what, **({"heard": now} | said))], now)


def until_stalled(watch: TokenProgress, what: WorkerActivity, start: float, limit: float = 200.0) -> float:
    """Seconds of nothing until the worker is found."""
    now = start
    while not judge(watch, what, now):
        now += _TICK_S
        assert now < start + limit
    return now - start


def until_found(watch: TokenProgress, start: float, *, seed: int, quiet: bool, limit: float = 60.0) -> float:
    """The same with a heartbeat a second, each late by up to half a second, that says (`quiet`) since when its engine
    has made no token: since `start`.
    """
    draw = random.Random(seed)
    beats = [start + draw.random() + number for number in range(int(limit))]
    come = [(sent + draw.uniform(0.0, 0.5), sent) for sent in beats]
    now, heard, made = start, start, start
    while True:
        while come and come[0][0] <= now:
            heard, sent = come.pop(0)
            made = heard - (sent - start) if quiet else -inf
        if judge(watch, doing(8), now, heard=heard, made=made):
            return now - start
        now += _TICK_S
        assert come


def busy(
    watch: TokenProgress, seed: int, *, flush_s: float, jitter_s: float, until: float, judge_late: float = 0.0
) -> float:
    """Tokens arrive every `flush_s`, each message late by up to `jitter_s`; nobody is found. Returns the end of it."""
    draw = random.Random(seed)
    arrivals = sorted(n * flush_s + draw.uniform(0.0, jitter_s) for n in range(1, int(until / flush_s)))
    now, last = 0.0, 0.0
    while arrivals:
        while arrivals and arrivals[0] <= now:
            last = arrivals.pop(0)
            watch.arrived("a", last)
        assert judge(watch, doing(8), now) == []
        now += _TICK_S + draw.uniform(0.0, judge_late)
    return max(last, now)


@pytest.mark.parametrize("seed", range(20))
def test_an_engine_that_stops_is_found_within_three_seconds_and_none_that_goes_on(seed: Any) -> None:
    watch = TokenProgress()
    last = busy(watch, seed, flush_s=0.25, jitter_s=0.5, until=600.0, judge_late=0.3)
    assert until_found(watch, last, seed=seed, quiet=bool(seed % 2)) <= 3.0


def test_a_loaded_worker_is_waited_for_longer_and_a_rested_one_no_more() -> None:
    watch = TokenProgress()
    last = busy(watch, 1, flush_s=1.9, jitter_s=0.05, until=60.0)
    assert 3.5 <= until_stalled(watch, doing(8), last) <= 4.5
    watch.forget("a")
    assert watch.quiet_s("a", last) == 0.0


def test_workers_that_wait_for_the_store_or_have_no_work_are_not_waited_for() -> None:
    watch = TokenProgress()
    busy(watch, 1, flush_s=0.25, jitter_s=0.0, until=10.0)
    now = 10.0
    for what in [doing(8, excused=True)] * 100 + [doing(0)] * 100:
        now += _TICK_S
        assert judge(watch, what, now) == []
        assert watch.quiet_s("a", now) == 0.0
    assert 2.0 <= until_stalled(watch, doing(8), now + _TICK_S) <= 3.0  # from when it had work again


def test_a_first_token_has_the_time_that_first_tokens_take() -> None:
    watch = TokenProgress()
    assert until_stalled(watch, doing(0, 4), 0.0) >= CEILING_S  # none was ever seen
    watch = TokenProgress()
    for tick in range(13):
        judge(watch, doing(0, 4), tick * _TICK_S)
    watch.arrived("a", 3.0)  # after three seconds
    assert 5.5 <= until_stalled(watch, doing(0, 4), 3.0) <= 6.5


def test_a_hold_is_waited_for_until_its_end_but_not_for_ever() -> None:
    watch = TokenProgress()
    last = busy(watch, 1, flush_s=0.25, jitter_s=0.0, until=10.0)
    for now in (last + tick * _TICK_S for tick in range(200)):
        assert judge(watch, doing(8, held=True), now) == []
    watch.arrived("a", now)  # what it had made before
    start = now + _TICK_S
    assert 2.0 <= until_stalled(watch, doing(8), start) <= 3.0  # the hold's length is taken for no gap of its engine
    watch = TokenProgress()
    last = busy(watch, 1, flush_s=0.25, jitter_s=0.0, until=10.0)
    assert CEILING_S <= until_stalled(watch, doing(8, held=True), last) <= CEILING_S + 1.0
    watch = TokenProgress()
    for tick in range(800):
        assert judge(watch, doing(0, held=True), tick * _TICK_S) == []  # without work it may
        assert judge(watch, doing(8, held=True, excused=True), tick * _TICK_S) == []


def after_a_short_first_token(watch: TokenProgress) -> float:
    """Of 0.3 s, then five minutes of decoding, then rest."""
    judge(watch, doing(0, 1, unread=500), 0.0)
    judge(watch, doing(0, 1, unread=500), 0.25)
    watch.arrived("a", 0.3)
    now = 0.3
    while now < 300.0:
        now += _TICK_S
        watch.arrived("a", now)
        assert judge(watch, doing(1), now) == []
    assert judge(watch, doing(0), now + _TICK_S) == []
    return now + 2 * _TICK_S


def test_a_long_prefill_on_an_idle_worker_is_no_stall() -> None:
    watch = TokenProgress()
    now = after_a_short_first_token(watch)
    assert 30.0 <= until_stalled(watch, doing(0, 1, unread=30_000), now) <= 33.0
    watch = TokenProgress()
    now = after_a_short_first_token(watch)
    assert until_stalled(watch, doing(0, 1, unread=300_000), now) <= CEILING_S + 1.0
    watch = TokenProgress()
    now = after_a_short_first_token(watch)
    assert 2.0 <= until_stalled(watch, doing(0, 1, unread=500), now) <= 3.0


def test_an_engine_that_reads_and_decodes_has_time_for_both_and_one_that_only_decodes_has_not() -> None:
    watch = TokenProgress()
    now = after_a_short_first_token(watch)
    assert 22.0 <= until_stalled(watch, doing(4, 1, unread=20_000), now) <= 23.0
    watch = TokenProgress()
    now = after_a_short_first_token(watch)
    assert 2.0 <= until_stalled(watch, doing(4), now) <= 3.0


def test_what_first_tokens_take_is_not_forgotten_while_others_are_made() -> None:
    watch = TokenProgress()
    for tick in range(41):
        judge(watch, doing(0, 4), tick * _TICK_S)
    watch.arrived("a", 10.0)
    now = 10.0
    while now < 610.0:
        now += _TICK_S
        watch.arrived("a", now)
        judge(watch, doing(4), now)
    judge(watch, doing(0), now)
    assert 19.0 <= until_stalled(watch, doing(0, 1), now + _TICK_S) <= 21.0


def test_the_judges_own_sleep_is_no_stall() -> None:
    watch = TokenProgress()
    last = busy(watch, 3, flush_s=0.25, jitter_s=0.1, until=20.0)
    assert judge(watch, doing(8), last + 30.0) == []
    assert until_stalled(watch, doing(8), last + 30.0 + _TICK_S) >= 1.0


def test_workers_are_found_together() -> None:
    watch = TokenProgress()
    found: list[str] = []
    for tick in range(40):
        if tick < 8:
            watch.arrived("a", tick * _TICK_S)
            watch.arrived("b", tick * _TICK_S)
        both = [replace(doing(2, session=name), heard=tick * _TICK_S) for name in "ab"]
        found = watch.stalled(both, tick * _TICK_S)
        if found:
            break
    assert found == ["a", "b"]


def test_who_is_silent_altogether_is_not_found_here_nor_when_it_wakes() -> None:
    watch = TokenProgress()
    frozen = busy(watch, 1, flush_s=0.25, jitter_s=0.0, until=10.0)
    now = frozen
    while now < frozen + 100.0:
        now += _TICK_S
        assert judge(watch, doing(8), now, heard=frozen) == []
    assert watch.quiet_s("a", now) <= PAUSE_S + _TICK_S
    assert judge(watch, doing(8), now, made=now - 100.0) == []  # its first heartbeat; its tokens come behind it
    assert until_stalled(watch, doing(8), now + _TICK_S) <= 1.5  # or else they do not


def test_tokens_that_are_late_are_waited_for_while_the_engine_makes_more() -> None:
    watch = TokenProgress()
    last = now = busy(watch, 1, flush_s=0.25, jitter_s=0.0, until=10.0)
    while now < last + LATE_S - 1.0:
        now += _TICK_S
        assert judge(watch, doing(8), now, made=now - 0.5) == []
    made = now
    while not judge(watch, doing(8), now, made=made):
        now += _TICK_S
    assert now - made <= 2.5  # it has stopped
    watch.arrived("a", now)
    start = now
    while not judge(watch, doing(8), now, made=now - 0.1):
        now += _TICK_S
    assert LATE_S - 1.0 <= now - start <= LATE_S + 1.0  # nothing comes out of it at all


def test_a_worker_that_is_heard_less_often_is_judged_by_several_heartbeats() -> None:
    watch = TokenProgress(floor_s=10.0, pause_s=6.25)
    last = busy(watch, 1, flush_s=0.25, jitter_s=0.0, until=10.0)
    now = last
    while not judge(watch, doing(8), now, heard=last + 5.0 * int((now - last) / 5.0)):
        now += _TICK_S
    assert 10.0 <= now - last <= 11.0


@pytest.mark.parametrize("seed", range(4))
def test_ten_minutes_of_jitter_and_a_loaded_processor_make_no_suspect(seed: Any) -> None:
    """Messages late by half a second, the judge and the engine by a second now and then."""
    watch, draw = TokenProgress(), random.Random(seed)
    now, made, heard = 0.0, 0.0, 0.0
    tokens: list[float] = []
    beats: list[tuple[float, float]] = []
    next_step, next_flush, next_beat = 0.1, 0.25, 1.0
    while now < 600.0:
        now += _TICK_S + (draw.uniform(0.0, 0.9) if draw.random() < 0.05 else 0.0)
        while next_step <= now:
            made = next_step
            next_step += 0.1 + (draw.uniform(0.0, 1.0) if draw.random() < 0.05 else 0.0)
        while next_flush <= now:
            tokens.append(next_flush + draw.uniform(0.0, 0.5))
            next_flush = max(next_flush + 0.25, made)
        while next_beat <= now:
            beats.append((next_beat + draw.uniform(0.0, 0.5), max(0.01, next_beat - made)))
            next_beat += 1.0
        for at in sorted(at for at in tokens if at <= now):
            watch.arrived("a", at)
            heard = max(heard, at)
        tokens = [at for at in tokens if at > now]
        said = -inf
        for at, quiet_s in beats:
            if at <= now:
                heard, said = max(heard, at), at - quiet_s
        beats = [one for one in beats if one[0] > now]
        assert judge(watch, doing(8), now, heard=heard, made=said) == []


def until(watch: TokenProgress, what: WorkerActivity, start: float, end: float) -> bool:
    """Whether the worker is found between the two."""
    now, found = start, False
    while now < end:
        found = bool(judge(watch, what, now)) or found
        now += _TICK_S
    return found


@pytest.mark.parametrize("what", [doing(8), doing(0, 8), doing(3, 5)])
def test_a_worker_whose_host_has_itself_back_is_no_case_however_long(what: WorkerActivity) -> None:
    watch = TokenProgress()
    judge(watch, what, 0.0)
    assert not until(watch, replace(what, reclaimed=True), 0.25, 3_600.0)


def test_a_worker_that_makes_nothing_whenever_it_may_is_found_across_its_grants() -> None:
    """A second of grant, three of none: what it was waited for adds up."""
    watch = TokenProgress()
    judge(watch, doing(8), 0.0)
    watch.arrived("a", 0.5)
    now = 0.5
    while not until(watch, doing(8), now, now + 1.0):
        assert not until(watch, doing(8, reclaimed=True), now + 1.0, now + 4.0)
        now += 4.0
        assert now < 40.0
    assert now >= 4.0


def test_a_worker_that_makes_tokens_in_each_of_its_short_grants_is_trusted() -> None:
    watch = TokenProgress()
    judge(watch, doing(8), 0.0)
    for number in range(200):
        now = 10.0 * number
        watch.arrived("a", now + 0.2)
        assert not until(watch, doing(8), now + 0.25, now + 1.5)
        assert not until(watch, doing(8, reclaimed=True), now + 1.5, now + 10.0)


@pytest.mark.parametrize("flush_s", [0.0, 2.5, 4.0])
def test_a_worker_that_was_told_to_flush_seldom_gets_so_much_longer(flush_s: float) -> None:
    watch = TokenProgress()
    busy(watch, 1, flush_s=0.25, jitter_s=0.1, until=20.0)
    found = until_stalled(watch, doing(flush_s=flush_s), 20.0)
    assert flush_s < found - 1.0
    assert found <= 3.0 + flush_s
