"""Laws of reclaims: what leaves a worker whose host has itself back, and who gets the places of borrowed workers."""

import random
from math import inf
from typing import Any

import pytest

from ebbtide.coordinator.rules.move_costs import COSTS, SHORT_S, LentHost, interrupted, leaving, risk_s
from ebbtide.coordinator.rules.placement import place
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout, RolloutQueue
from ebbtide.coordinator.rules.turn_routing import CachedPrefix
from ebbtide.coordinator.rules.worker_view import WorkerView, may_take
from ebbtide.step_pacing import VersionBounds

#: Tokens/s of a prefill.
SPEED = 5_000.0


def standing(lasted_s: float, spell_s: float = 0.0) -> LentHost:
    return LentHost(reclaimed=True, lasted_s=lasted_s, spell_s=spell_s)


@pytest.mark.parametrize("forecast_s", [0.0, 0.3, 10.0, 3_600.0])
def test_a_short_reclaim_moves_nothing_whatever_was_forecast(forecast_s: float) -> None:
    for lasted_s in (0.0, 0.03, 0.25, 1.0, SHORT_S - 0.01):
        assert leaving(standing(lasted_s, forecast_s), [100, 20_000], room=8, prefill=SPEED) == []


def test_a_long_one_moves_everything() -> None:
    assert leaving(standing(2.5, 60.0), [500, 100, 20_000], room=8, prefill=SPEED) == [1, 0, 2]
    assert leaving(standing(60.0), [500, 100, 20_000], room=0, prefill=SPEED) == [1, 0, 2]


def test_a_reclaim_that_is_forecast_to_end_before_a_move_would_is_sat_through() -> None:
    assert leaving(standing(2.5, 0.3), [100, 500], room=8, prefill=SPEED) == []


def test_a_reclaim_that_outlasts_its_forecast_refutes_it() -> None:
    assert leaving(standing(30.0, 0.3), [100, 500], room=8, prefill=SPEED) == [0, 1]


def test_only_as_many_leave_as_others_have_room_for_until_it_is_long() -> None:
    assert leaving(standing(3.0, 5.0), [400, 300, 200, 100], room=2, prefill=SPEED) == [3, 2]
    assert leaving(standing(3.0, 5.0), [400, 300, 200, 100], room=-3, prefill=SPEED) == []
    assert len(leaving(standing(12.0, 30.0), [400, 300, 200, 100], room=0, prefill=SPEED)) == 4


def test_what_is_dear_to_move_waits_longer() -> None:
    long = 50_000
    wait = COSTS.margin * COSTS.move_s(long, SPEED)
    assert leaving(standing(3.0, wait - 0.1), [100, long], room=8, prefill=SPEED) == [0]
    assert leaving(standing(3.0, wait + 0.1), [100, long], room=8, prefill=SPEED) == [0, 1]


def test_where_prompts_are_read_fast_a_move_is_cheap_and_slow_readers_make_it_dear() -> None:
    assert leaving(standing(3.0, 3.0), [20_000], room=8, prefill=4 * SPEED) == [0]
    assert leaving(standing(3.0, 3.0), [20_000], room=8, prefill=SPEED) == []
    assert leaving(standing(3.0, 3.0), [4_000], room=8, prefill=SPEED) == [0]
    assert leaving(standing(3.0, 3.0), [4_000], room=8, prefill=SPEED / 4) == []


def test_a_worker_that_works_keeps_what_it_has() -> None:
    assert leaving(LentHost(reclaimed=False, lasted_s=99.0, spell_s=0.0), [100], room=8, prefill=SPEED) == []


@pytest.mark.parametrize("seed", range(50))
def test_more_leave_the_longer_it_lasts_and_the_longer_it_will(seed: int) -> None:
    draw = random.Random(seed)
    tokens = [draw.randrange(1, 30_000) for _ in range(draw.randrange(1, 20))]
    lasted_s, spell_s, room = draw.uniform(0, 20), draw.uniform(0, 20), draw.randrange(20)
    few = set(leaving(standing(lasted_s, spell_s), tokens, room=room, prefill=SPEED))
    assert few <= set(leaving(standing(lasted_s + draw.uniform(0, 5), spell_s), tokens, room=room, prefill=SPEED))
    assert few <= set(leaving(standing(lasted_s, spell_s + draw.uniform(0, 5)), tokens, room=room, prefill=SPEED))


def test_a_steady_worker_is_never_interrupted_and_a_spell_of_nothing_always() -> None:
    assert interrupted(1e6, 30.0, inf) == 0.0
    assert interrupted(1.0, 30.0, 0.0) == 1.0
    assert 0.0 < interrupted(300.0, 30.0, 60.0) < interrupted(3_000.0, 30.0, 60.0) < 1.0


def test_short_work_and_cheap_moves_risk_least() -> None:
    least = risk_s(100, 100.0, rate=30.0, spell_s=20.0, prefill=SPEED)
    assert least < risk_s(100, 5_000.0, rate=30.0, spell_s=20.0, prefill=SPEED)
    assert least < risk_s(10_000, 100.0, rate=30.0, spell_s=20.0, prefill=SPEED)


# Places of borrowed hosts.


def waiting(number: int, made: int = 0, **more: Any) -> QueuedRollout:
    return QueuedRollout(
        rollout_id=f"r{number}", episode_id=f"e{number}", bounds=VersionBounds(0, 0), length=100 + made, place=number,
        made=made, **more,
    )  # fmt: skip


def worker(name: str, slots: int, running: int = 0, **more: Any) -> WorkerView:
    return WorkerView(
        session_id=name, worker_id=name, slots=slots, running=running, installed=1, target=1, max_model_len=40_000,
        rate=30.0, **more,
    )  # fmt: skip


def lent(
    name: str, slots: int, running: int = 0, *, share: float = 0.8, spell_s: float = 10.0, **more: Any
) -> WorkerView:
    return worker(name, slots, running, borrowed=True, share=share, spell_s=spell_s, **more)


def rest(one: QueuedRollout) -> float:
    return 200.0 + one.made  # the longer one has grown, the longer it will grow


def placed(line: list[QueuedRollout], workers: list[WorkerView], **more: Any) -> dict[str, str]:
    queue = RolloutQueue()
    for one in line:
        queue.add(one)
    return dict(place(queue, workers, more.pop("prefixes", {}), rest=rest, **more))


def test_long_work_goes_to_the_steady_worker_and_short_work_to_the_shaky_one() -> None:
    line = [waiting(0), waiting(1, 4_000), waiting(2, 10), waiting(3, 9_000)]
    found = placed(line, [worker("steady", 2), lent("shaky", 2)])
    assert found == {"r0": "shaky", "r2": "shaky", "r1": "steady", "r3": "steady"}


def test_long_work_at_the_head_of_the_line_waits_for_a_steady_place_and_lets_short_work_pass() -> None:
    line = [waiting(0, 9_000), waiting(1, 8_000), waiting(2, 10)]
    assert placed(line, [worker("steady", 2, running=2), lent("shaky", 1)]) == {"r2": "shaky"}
    assert placed(line, [worker("steady", 2, running=1), lent("shaky", 1)]) == {"r0": "steady", "r2": "shaky"}


def test_long_work_waits_for_a_steady_place_only_for_a_while() -> None:
    line = [waiting(0, 9_000, since=100.0), waiting(1, 10, since=100.0)]
    workers = [worker("steady", 1, running=1), lent("shaky", 1)]
    assert placed(line, workers, now=105.0) == {"r1": "shaky"}
    assert placed(line, workers, now=115.0) == {"r0": "shaky"}


def test_without_a_steady_worker_the_line_keeps_its_order() -> None:
    line = [waiting(0, 9_000), waiting(1, 10)]
    assert placed(line, [lent("shaky", 1)]) == {"r0": "shaky"}


def test_a_lower_priority_never_passes_a_higher_one() -> None:
    line = [waiting(0, 9_000), waiting(1, 10, priority=1)]
    assert placed(line, [worker("steady", 1, running=1), lent("shaky", 1)]) == {"r0": "shaky"}


def test_a_host_that_has_itself_back_gets_nothing_new() -> None:
    assert placed([waiting(0)], [lent("shaky", 4, shut=True)]) == {}
    assert placed([waiting(0)], [worker("steady", 4), lent("shaky", 8, shut=True)]) == {"r0": "steady"}


def test_a_borrowed_worker_counts_for_the_share_of_the_time_that_it_has() -> None:
    even = [worker("steady", 8), lent("shaky", 8, share=0.4)]
    assert placed([waiting(0)], even) == {"r0": "steady"}
    fast = [worker("steady", 8), lent("shaky", 8, share=0.4, spell_s=1e6)]
    fast[1] = WorkerView(**{name: getattr(fast[1], name) for name in WorkerView.__struct_fields__} | {"rate": 300.0})
    assert placed([waiting(0)], fast) == {"r0": "shaky"}


def test_a_run_borrows_no_more_than_it_may() -> None:
    line = [waiting(number) for number in range(10)]
    found = placed(line, [worker("steady", 3), lent("a", 8), lent("b", 8)], borrowable=4)
    assert sorted(found.values()).count("steady") == 3
    assert len(found) == 7
    assert set(placed(line, [worker("steady", 3), lent("a", 8)], borrowable=0).values()) == {"steady"}
    assert placed(line, [lent("a", 8)], borrowable=0) == {}


def test_a_turn_stays_with_its_episodes_worker_be_it_borrowed() -> None:
    line = [waiting(0, 9_000), waiting(1)]
    found = placed(
        line, [worker("steady", 1), lent("shaky", 1)], prefixes={"e0": {"shaky": CachedPrefix(version=1, tokens=9)}}
    )
    assert found == {"r0": "shaky", "r1": "steady"}


@pytest.mark.parametrize("seed", range(200))
def test_in_any_fleet_places_are_only_exchanged_never_lost_nor_given_to_who_may_not_have_them(seed: int) -> None:
    draw = random.Random(seed)
    line = [
        waiting(number, draw.choice((0, 10, 500, 9_000)), priority=draw.randrange(2),
                no_progress=draw.choice((0, 0, 1)),
                avoid=frozenset(draw.sample(("h0", "h1", "h2"), draw.choice((0, 0, 1)))))
        for number in range(draw.randrange(1, 40))
    ]  # fmt: skip
    workers = [
        draw.choice((worker, lent))(f"h{number}", slots := draw.randrange(1, 9), draw.randrange(slots + 1))
        for number in range(draw.randrange(1, 5))
    ]
    queue = RolloutQueue()
    for one in line:
        queue.add(one)
    plain, dealt = place(queue, workers, {}), dict(place(queue, workers, {}, rest=rest))
    by_id, by_name = {one.rollout_id: one for one in line}, {one.session_id: one for one in workers}
    assert sorted(name for _, name in plain) == sorted(dealt.values())
    before = dict(plain)
    for rollout_id, name in dealt.items():
        moved = before.get(rollout_id) != name
        assert not moved or may_take(by_id[rollout_id], by_name[name])
    if all(not one.borrowed for one in workers):
        assert before == dealt  # who is reserved is not affected


def test_what_a_lender_waits_for_leaves_at_once_whether_or_not_there_is_room() -> None:
    waits = LentHost(reclaimed=True, hand_over=True)
    assert leaving(waits, [500, 100, 20_000], room=-2, prefill=SPEED) == [1, 0, 2]
    assert leaving(LentHost(reclaimed=False, hand_over=True), [100], room=8, prefill=SPEED) == []
