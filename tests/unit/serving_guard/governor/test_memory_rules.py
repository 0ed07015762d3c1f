"""Laws of the KV cache beside serving, over steps, bursts and random walks, and of where weights stay."""

import itertools
import random
from collections.abc import Callable, Iterator

import pytest

from ebbtide.serving_guard.governor.memory import (
    CUT,
    NORMAL,
    PRESSURE,
    REGROW,
    DeviceMemory,
    KvAllowance,
    KvBudget,
    KvPeaks,
    KvRises,
    KvRules,
    ResidencyPlan,
)
from ebbtide.types.grants import Residency

LIMIT = 1000
FULL = 900
RULES = KvRules()


class Pair:
    """Rollouts that take all that they may, and give back what they may not within one update."""

    def __init__(self, full: int = FULL) -> None:
        self.budget = KvBudget()
        self.full = full
        self.now = 0.0
        self.rollout = 0
        self.last = KvAllowance(0, "")

    def update(self, serving: int, after: float = 0.05) -> KvAllowance:
        self.now += after
        self.last = self.budget.update(self.now, serving=serving, rollout=self.rollout, limit=LIMIT, full=self.full)
        self.rollout = self.last.kv_bytes
        return self.last

    def run(self, serving: Callable[[float], int], seconds: float) -> Iterator[KvAllowance]:
        end = self.now + seconds
        while self.now < end:
            yield self.update(serving(self.now))


def walk(seed: int) -> Callable[[float], int]:
    """Serving's use: quiet stretches, bursts, and slow drifts."""
    generator = random.Random(seed)
    state = {"at": 0.0, "to": 0.0}

    def at(_now: float) -> int:
        if generator.random() < 0.01:
            state["to"] = generator.choice([0, 50, 300, 700, 1200]) * generator.random()
        state["at"] += (state["to"] - state["at"]) * generator.random() * 0.5
        return int(state["at"])

    return at


@pytest.mark.parametrize("seed", range(20))
def test_both_stay_below_the_limit_once_a_cut_is_honoured(seed: int) -> None:
    pair, serving = Pair(), walk(seed)
    for _ in range(4000):
        use = serving(pair.now)
        allowance = pair.update(use)
        assert 0 <= allowance.kv_bytes <= FULL
        assert use + allowance.kv_bytes <= max(LIMIT * (1 - RULES.headroom), use)


@pytest.mark.parametrize("serving", range(0, 1100, 50))
def test_a_cut_takes_exactly_what_is_needed(serving: int) -> None:
    pair = Pair()
    pair.update(0)
    before = pair.last.kv_bytes
    allowance = pair.update(serving)
    reserve = max(int(LIMIT * RULES.headroom), min(int(LIMIT * RULES.headroom_most), serving))
    assert allowance.kv_bytes == max(0, min(before, LIMIT - serving - reserve))
    assert allowance.short == max(0, serving + int(LIMIT * RULES.headroom) - LIMIT)


@pytest.mark.parametrize("seed", range(10))
def test_more_use_by_serving_never_allows_rollouts_more(seed: int) -> None:
    generator = random.Random(seed)
    history = [int(900 * generator.random()) for _ in range(100)]
    allowed = []
    for last in range(0, 1200, 100):
        pair = Pair()
        for use in history:
            pair.update(use)
        allowed.append(pair.update(last).kv_bytes)
    assert allowed == sorted(allowed, reverse=True)


def test_a_second_rise_is_cut_again_at_once() -> None:
    pair = Pair()
    pair.update(0)
    first = pair.update(300).kv_bytes
    second = pair.update(600).kv_bytes
    assert first > second
    assert second <= LIMIT - 600


def test_a_step_of_serving_is_answered_by_one_cut_and_no_to_and_fro() -> None:
    pair = Pair()
    list(pair.run(lambda _: 0, 5))
    allowed = [item.kv_bytes for item in pair.run(lambda _: 400, 120)]
    changes = [b - a for a, b in itertools.pairwise(allowed) if a != b]
    assert all(change > 0 for change in changes), "it was cut again although serving asked for no more"
    assert allowed[-1] <= LIMIT - 400 - LIMIT * RULES.headroom


def test_single_requests_that_come_and_go_move_nothing_once_they_are_known() -> None:
    pair = Pair()
    list(pair.run(lambda now: 400 + 20 * (int(now) % 2), 30))
    allowed = {item.kv_bytes for item in pair.run(lambda now: 400 + 20 * (int(now) % 2), 60)}
    assert len(allowed) == 1


def test_after_a_burst_all_of_it_comes_back_at_once() -> None:
    pair = Pair()
    phases = [pair.update(0).phase]
    phases += [pair.update(800).phase, pair.update(800).phase]
    after = list(pair.run(lambda _: 0, 10))
    most = pair.last.kv_bytes
    assert most == LIMIT * (1 - RULES.headroom_most), "the burst's speed is remembered for a while"
    regrown = next(index for index, item in enumerate(after) if item.kv_bytes == most) * 0.05
    assert regrown <= RULES.quiet_s + 0.1
    assert phases == [NORMAL, CUT, PRESSURE]
    seen = list(dict.fromkeys(item.phase for item in after))
    assert seen == [PRESSURE, NORMAL]
    list(pair.run(lambda _: 0, 2 * RULES.remember_s))
    assert pair.last.kv_bytes == FULL


def test_nothing_grows_within_the_quiet_time() -> None:
    pair = Pair()
    pair.update(0)
    cut = pair.update(500).kv_bytes
    while pair.now < 0.1 + RULES.quiet_s - 0.06:
        assert pair.update(0).kv_bytes == cut


def test_bursts_right_behind_a_growth_make_the_quiet_time_longer_and_peace_makes_it_shorter() -> None:
    def regrowth(pair: Pair) -> float:
        pair.update(700)
        start = pair.now
        while pair.update(0).kv_bytes <= LIMIT - 700:
            pass
        return pair.now - start

    pair = Pair()
    pair.update(0)
    times = [regrowth(pair) for _ in range(6)]
    assert times[-1] > 2 * times[0]
    assert times[-1] <= 1.0
    list(pair.run(lambda _: 0, 120))
    assert regrowth(pair) < 1.5 * times[0]


@pytest.mark.parametrize("seed", range(20))
def test_an_idle_second_later_rollouts_hold_their_share_again(seed: int) -> None:
    pair, serving = Pair(), walk(seed)
    for _ in range(20):
        list(pair.run(serving, 15))
        list(pair.run(lambda _: 0, 1.0))
        assert pair.last.kv_bytes >= LIMIT * (1 - RULES.headroom_most)
        assert pair.last.phase == NORMAL


@pytest.mark.parametrize("seed", range(20))
def test_within_a_burst_nothing_goes_to_and_fro(seed: int) -> None:
    generator, pair = random.Random(seed), Pair()
    list(pair.run(lambda _: 0, 5))
    pair.update(650)
    held = [item.kv_bytes for item in pair.run(lambda _: generator.randint(200, 650), 30)]
    given_back = sum(max(0, before - after) for before, after in itertools.pairwise(held))
    assert given_back <= 0.2 * LIMIT, "what a peak of it will take again is not handed out between two"


def test_what_stays_of_a_burst_that_ebbs_but_does_not_end_is_grown_into_step_by_step() -> None:
    pair = Pair()
    pair.update(700)
    after = list(pair.run(lambda _: 300, RULES.burst_s + 8 * RULES.step_s))
    changes = [b.kv_bytes - a.kv_bytes for a, b in itertools.pairwise(after) if a.kv_bytes != b.kv_bytes]
    assert max(changes) <= LIMIT * RULES.step
    assert after[-1].kv_bytes >= LIMIT * (1 - 0.3 - RULES.headroom_most - 0.03)
    assert REGROW in {item.phase for item in after}


@pytest.mark.parametrize("seed", range(10))
def test_rollouts_are_left_nothing_rather_than_less_than_one_of_them_needs(seed: int) -> None:
    budget, serving, least, held = KvBudget(), walk(seed), 200, 0
    seen = set()
    for index in range(4000):
        use = serving(0.05 * index)
        held = budget.update(0.05 * index, serving=use, rollout=held, limit=LIMIT, full=FULL, least=least).kv_bytes
        assert held == 0 or held >= least
        assert use + held <= max(LIMIT * (1 - RULES.headroom), use)
        seen.add(held == 0)
    assert seen == {True, False}


def test_the_highest_of_late_is_known_and_forgotten() -> None:
    peaks = KvPeaks(window_s=3.0)
    seen = [peaks.add(now, value) for now, value in [(0, 5), (1, 9), (2, 3), (4, 4), (4.5, 1), (8, 2)]]
    assert seen == [5, 9, 9, 9, 4, 2]


def test_cuts_into_what_nobody_holds_do_not_make_growth_slower() -> None:
    budget = KvBudget()
    now = 0.0
    for _ in range(20):
        for serving in [0] * 40 + [700] * 2:
            now += 0.05
            budget.update(now, serving=serving, rollout=0, limit=LIMIT, full=FULL)
    after = []
    for _ in range(80):
        now += 0.05
        after.append(budget.update(now, serving=0, rollout=0, limit=LIMIT, full=FULL).kv_bytes)
    assert after[-1] == LIMIT * (1 - RULES.headroom_most)


def test_small_rollout_engines_are_not_bounded_at_all_by_small_use() -> None:
    pair = Pair(full=300)
    assert {item.kv_bytes for item in pair.run(lambda now: 300 + int(now) % 3, 20)} == {300}
    assert pair.last.phase == NORMAL


def test_what_serving_took_fast_is_kept_free_for_a_while_and_forgotten_then() -> None:
    rises = KvRises(window_s=0.5, remember_s=60)
    assert rises.add(0.0, 100) == 0
    assert rises.add(0.4, 180) == 80
    assert rises.add(10.0, 170) == 80
    assert rises.add(70.0, 180) == 80
    assert rises.add(140.0, 180) == 0


def test_a_limit_that_shrinks_cuts_too() -> None:
    budget = KvBudget()
    assert budget.update(0, serving=100, rollout=0, limit=LIMIT, full=FULL).kv_bytes > 700
    allowance = budget.update(1, serving=100, rollout=700, limit=500, full=FULL)
    assert allowance.kv_bytes <= 400
    assert allowance.phase == CUT


def bursts(seed: int, seconds: float, step: float) -> list[int]:
    """Serving's use: little, and every minute or so a burst of some seconds."""
    generator, use, found, until = random.Random(seed), 50, [], 0.0
    now = 0.0
    while now < seconds:
        if now >= until:
            burst = use <= 100 and generator.random() < 0.5
            use = generator.randint(300, 700) if burst else generator.randint(20, 100)
            until = now + (generator.uniform(2, 15) if burst else generator.uniform(20, 120))
        found.append(use)
        now += step
    return found


def halved_once(uses: list[int], step: float, watermark: float, freeze_s: float = 600) -> float:
    """The reported policy of ROSE: a fifth is kept for serving; when so much of that is in use, the budget is halved,
    once, until the next step of the training. Returns memory times time."""
    share, held, frozen = 0.0, int(0.8 * LIMIT), float("-inf")
    for index, use in enumerate(uses):
        now = index * step
        if now % freeze_s < step:
            held, frozen = int(0.8 * LIMIT), float("-inf")
        if use > watermark * 0.2 * LIMIT and frozen < 0:
            held, frozen = held // 2, now
        share += held * step
    return share


@pytest.mark.parametrize("seed", range(5))
def test_rollouts_have_more_than_by_halving_once_and_serving_is_never_short(seed: int) -> None:
    uses = bursts(seed, 1800, 0.05)
    pair, share = Pair(), 0.0
    for use in uses:
        assert use + pair.update(use).kv_bytes <= LIMIT
        share += pair.last.kv_bytes * 0.05
    assert share > 0.9 * sum(min(FULL, LIMIT - use) for use in uses) * 0.05, "most of what there was"
    assert share > 1.5 * max(halved_once(uses, 0.05, watermark) for watermark in (0.25, 0.5, 0.75, 1.0))


AWAKE, HOST, AWAY = Residency.AWAKE, Residency.HOST, Residency.AWAY
ROOMY = DeviceMemory(short=0, spare=100, weights=10, host_spare=100, device=True)
SHORT = DeviceMemory(short=1, spare=0, weights=10, host_spare=100, device=True)


def settled(memory: DeviceMemory, at: Residency) -> Residency:
    """Where they go when `memory` stays so for a second."""
    weights = ResidencyPlan()
    weights.decide(0.0, at=at, memory=memory, idle_s=0)
    return weights.decide(1.0, at=at, memory=memory, idle_s=0)


def test_weights_stay_while_nothing_is_short_however_busy_the_host_is() -> None:
    weights = ResidencyPlan()
    for now in range(1000):
        assert weights.decide(now, at=AWAKE, memory=ROOMY, idle_s=0) is AWAKE


def test_memory_that_is_short_for_a_moment_moves_nothing() -> None:
    weights = ResidencyPlan()
    for now in range(0, 100, 2):
        assert weights.decide(now, at=AWAKE, memory=SHORT, idle_s=0) is AWAKE
        assert weights.decide(now + 0.3, at=AWAKE, memory=SHORT, idle_s=0) is AWAKE
        weights.decide(now + 0.6, at=AWAKE, memory=ROOMY, idle_s=0)


@pytest.mark.parametrize(
    ("at", "memory", "goes"),
    [
        (AWAKE, SHORT, HOST),
        (AWAKE, DeviceMemory(short=1, spare=0, weights=10, host_spare=5, device=True), AWAY),
        (AWAKE, DeviceMemory(short=1, spare=0, weights=10, host_spare=100), AWAY),
        (AWAKE, DeviceMemory(short=0, spare=50, weights=10, host_short=5, device=True), AWAKE),
        (HOST, SHORT, HOST),
        (HOST, DeviceMemory(short=0, spare=50, weights=10, host_short=5, device=True), AWAY),
        (AWAY, SHORT, AWAY),
    ],
)
def test_they_go_as_far_down_as_helps_and_no_further(at: Residency, memory: DeviceMemory, goes: Residency) -> None:
    assert settled(memory, at) is goes


@pytest.mark.parametrize(("at", "wake_s"), [(HOST, 2.0), (AWAY, 20.0)])
def test_they_come_up_only_where_the_idle_time_pays_for_it(at: Residency, wake_s: float) -> None:
    for idle_s in (0.0, wake_s, 2.9 * wake_s):
        assert ResidencyPlan().decide(0, at=at, memory=ROOMY, idle_s=idle_s, wake_host_s=2, wake_away_s=20) is at
    assert ResidencyPlan().decide(0, at=at, memory=ROOMY, idle_s=3 * wake_s, wake_host_s=2, wake_away_s=20) is AWAKE


def test_they_do_not_come_up_without_room() -> None:
    memory = DeviceMemory(short=0, spare=9, weights=10, device=True)
    assert ResidencyPlan().decide(0, at=HOST, memory=memory, idle_s=1e9, wake_host_s=1) is HOST


def test_what_just_went_down_does_not_come_up_at_once() -> None:
    weights = ResidencyPlan()
    weights.decide(0.0, at=AWAKE, memory=SHORT, idle_s=1e9, wake_host_s=4)
    assert weights.decide(1.0, at=AWAKE, memory=SHORT, idle_s=1e9, wake_host_s=4) is HOST
    assert weights.decide(2.0, at=HOST, memory=ROOMY, idle_s=1e9, wake_host_s=4) is HOST
    assert weights.decide(5.0, at=HOST, memory=ROOMY, idle_s=1e9, wake_host_s=4) is AWAKE


def test_wake_ups_that_were_not_measured_are_taken_to_be_long() -> None:
    assert ResidencyPlan().decide(0, at=AWAY, memory=ROOMY, idle_s=60) is AWAY
    assert ResidencyPlan().decide(0, at=AWAY, memory=ROOMY, idle_s=600) is AWAKE


@pytest.mark.parametrize("seed", range(20))
def test_more_time_is_harvested_than_is_spent_on_waking_up(seed: int) -> None:
    """If forecasts hold: pressure comes with bursts, and each wake-up is followed by its idle time."""
    generator, weights = random.Random(seed), ResidencyPlan()
    at, now, waking, awake = AWAKE, 0.0, 0.0, 0.0
    for _ in range(50):
        burst, idle = generator.uniform(0, 20), generator.uniform(0, 100)
        end = now + burst
        while now < end:
            at, now = weights.decide(now, at=at, memory=SHORT, idle_s=0, wake_host_s=6), now + 0.1
        end = now + idle
        while now < end:
            wanted = weights.decide(now, at=at, memory=ROOMY, idle_s=end - now, wake_host_s=6)
            waking += 6.0 if wanted < at else 0.0
            at, now = wanted, now + 0.1
            awake += 0.1 if at is AWAKE else 0.0
    assert awake >= 2 * waking


def test_an_engine_that_made_memory_short_waits_twice_as_long_each_time_however_often_it_is_asked() -> None:
    plan, now, waits = ResidencyPlan(), 0.0, []
    roomy = DeviceMemory(short=0, spare=10, weights=10, host_spare=100, device=True)
    for _ in range(4):
        since = now
        while plan.decide(now, at=HOST, memory=roomy, idle_s=1e9, wake_host_s=0.1) is HOST:
            now += 0.5
        waits.append(now - since)
        for _ in range(5):  # it is on its way down for some decisions
            plan.decide(now, at=AWAKE, memory=SHORT, idle_s=1e9, wake_host_s=0.1)
            now += 0.6
    assert waits == pytest.approx([0.0, 60.0, 120.0, 240.0], abs=5.0)
