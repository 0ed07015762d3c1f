"""The governor keeps served requests within their targets, and uses the rest for rollouts, less after trouble."""

from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise
from math import inf
from random import Random

import pytest

from ebbtide.serving_guard.governor.budget_decider import BudgetDecision, LatencyTargets, StepLimits
from ebbtide.serving_guard.governor.governor import LEAST, Governor, Quiet, Ramp
from ebbtide.types.grants import GRANT_S


def calm(ramp: Ramp, begin: float, seconds: float, every: float = 0.005) -> list[float]:
    return [ramp.calm(begin + every * number) for number in range(1, 1 + round(seconds / every))]


def test_trouble_halves_what_was_used_and_calm_brings_all_of_it_back_within_a_second() -> None:
    ramp = Ramp()
    assert ramp.level == 1.0
    ramp.cut(1.0, 0.8)
    assert ramp.level == pytest.approx(0.4)
    levels = calm(ramp, 1.0, 0.9)
    assert levels == sorted(levels)
    assert levels[-1] == 1.0
    assert levels[5] == pytest.approx(0.6, abs=0.02)


def test_growth_is_slow_near_where_there_was_trouble() -> None:
    ramp = Ramp()
    calm(ramp, 0.0, 0.1)
    ramp.cut(1.0, 1.0)
    levels = calm(ramp, 1.0, 0.4)
    steps = [after - before for before, after in pairwise(levels) if after > before]
    assert steps[0] == pytest.approx(1 / 8)
    assert steps[-2] == pytest.approx(1 / 128)


def test_trouble_all_at_once_is_one_trouble() -> None:
    ramp = Ramp()
    for number in range(5):
        ramp.cut(1.0 + 0.001 * number, 1.0)
    assert ramp.level == 0.5


def test_it_never_falls_to_nothing() -> None:
    ramp = Ramp()
    for number in range(50):
        ramp.cut(float(number), 1.0)
    assert ramp.level == LEAST


def test_only_what_ran_was_calm() -> None:
    ramp = Ramp()
    ramp.cut(1.0, 1.0)
    assert ramp.calm(100.0) == 0.5
    assert ramp.calm(100.02) > 0.5


def test_a_limit_that_stays_is_approached_without_wide_swings() -> None:
    """A step response: from one moment on, more than 0.6 is trouble."""
    ramp, levels, now = Ramp(), [], 0.0
    for _ in range(2000):
        now += 0.01
        level = ramp.calm(now)
        if level > 0.6:
            ramp.cut(now, level)
        levels.append(level)
    last = levels[1000:]
    assert max(last) <= 0.65
    assert sum(last) / len(last) > 0.4
    cuts = sum(after < before for before, after in pairwise(last))
    assert cuts <= len(last) / 12


def quiet() -> Quiet:
    return Quiet(0.01, 0.002, 0.05)


def test_the_quiet_time_is_as_configured_until_gaps_were_seen() -> None:
    one = quiet()
    assert one.seconds == 0.01
    one.came(float("inf"), 0.008)
    assert one.seconds == 0.01


def test_requests_that_follow_at_once_lengthen_it_and_those_that_do_not_shorten_it() -> None:
    chained, sparse, random = quiet(), quiet(), Random(1)
    for _ in range(100):
        chained.came(random.uniform(0.005, 0.015) if random.random() < 0.8 else 2.0, 0.03)
        sparse.came(random.expovariate(1.0), 0.008)
    assert chained.seconds >= 0.015
    assert sparse.seconds == 0.002


@pytest.mark.parametrize("seed", range(10))
def test_it_stays_between_its_bounds(seed: int) -> None:
    one, random = quiet(), Random(seed)
    for _ in range(200):
        one.came(random.lognormvariate(-4, 3), random.expovariate(50.0))
        assert 0.002 <= one.seconds <= 0.05


_STEP_S = 0.008
_TARGETS = LatencyTargets(ttft_s=1.0, tpot_s=0.1, aim_ttft=0.4, aim_tpot=0.5, aim_gap=1.0, aim_slowed=10.0)


class Host:
    """A governor, and traffic for it. The test moves `now`."""

    def __init__(self, targets: LatencyTargets = _TARGETS, limits: StepLimits | None = None) -> None:
        self.governor = Governor(targets, limits or StepLimits())
        self.now = 100.0
        self.count = 0

    def decide(self) -> BudgetDecision:
        return self.governor.decide(self.now)

    def arrive(self, prompt: int = 500) -> str:
        self.count += 1
        self.governor.arrived(self.now, str(self.count), prompt)
        return str(self.count)

    def decode(self, name: str, tokens: int = 10, pause: float = 0.01) -> None:
        for _ in range(tokens):
            self.now += pause
            self.governor.produced(self.now, name, 1)

    def serve(self) -> None:
        """One request without anything beside it."""
        name = self.arrive()
        self.decide()
        self.now += 0.1
        self.governor.produced(self.now, name, 1)
        self.decode(name)
        self.governor.ended(self.now, name, ok=True)

    def step(self, count: int, tokens: int = 32, seconds: float = _STEP_S) -> None:
        for _ in range(count):
            self.now += seconds
            self.governor.stepped(self.now, tokens, seconds)

    def rest(self) -> BudgetDecision:
        """Nothing inside, until the quiet time is over."""
        decision = self.decide()
        while decision.state == "quiet":
            self.now = decision.review_at
            decision = self.decide()
        return decision


def learnt(targets: LatencyTargets = _TARGETS) -> Host:
    """A host that knows its engines."""
    host = Host(targets)
    for _ in range(30):
        host.rest()
        for tokens in (16, 32, 128):
            host.step(5, tokens, 0.004 + 0.000125 * tokens)
        host.serve()
    host.rest()
    return host


def test_idle_with_steps_known_everything_may_run() -> None:
    host = learnt()
    host.step(30, 256, 0.036)
    decision = host.decide()
    assert (decision.state, decision.budget.tokens, decision.budget.sequences) == ("idle", 256, 64)
    assert decision.budget.until == host.now + GRANT_S


def test_an_arrival_takes_everything_back_at_once() -> None:
    host = learnt(LatencyTargets(ttft_s=1.0, tpot_s=0.1, aim_tpot=0.0))
    assert host.decide().budget.tokens
    host.arrive()
    decision = host.decide()
    assert (decision.state, decision.budget.tokens) == ("reclaimed", 0)


def test_the_budget_comes_back_within_the_same_spell_after_a_quiet_time() -> None:
    host = learnt()
    host.serve()
    left = host.now
    decision = host.decide()
    assert (decision.state, decision.budget.tokens) == ("quiet", 0)
    assert host.rest().budget.tokens >= 128
    assert host.now - left <= StepLimits().quiet_most_s


def test_after_trouble_it_grows_again_by_itself_without_another_spell() -> None:
    host = learnt()
    host.step(1, 64, 0.5)
    budgets = [host.decide().budget.tokens]
    while budgets[-1] < 200 and len(budgets) < 100:
        host.step(1, 128, 0.02)
        budgets.append(host.decide().budget.tokens)
    assert budgets[0] == 32
    assert budgets == sorted(budgets)
    assert budgets[-1] >= 200


def test_nothing_known_is_a_few_tokens_at_a_time_while_idle_and_none_beside_requests() -> None:
    host = Host()
    assert host.decide().budget.tokens == StepLimits().first_tokens
    name = host.arrive()
    assert host.decide().budget.tokens == 0
    host.now += 0.1
    host.governor.produced(host.now, name, 1)
    assert host.decide().budget.tokens == 0
    host.decode(name, 100)
    assert host.decide().budget.tokens == 0  # the decode step is known by now, but no rollout step


def test_targets_that_are_factors_leave_no_sharing_until_learnt() -> None:
    host = Host(LatencyTargets(ttft_factor=2.0, tpot_factor=5.0, aim_tpot=0.9))
    host.step(50)
    for number in range(1, 26):
        host.rest()
        name = host.arrive()
        assert host.decide().budget.tokens == 0
        host.now += 0.1
        host.governor.produced(host.now, name, 1)
        host.decode(name)
        if number != 16:  # one that is served without rollouts
            known = host.governor.learnt(host.now).tpot_target_s > 0
            assert (host.decide().budget.tokens > 0) == known
        host.governor.ended(host.now, name, ok=True)
    found = host.governor.learnt(host.now)
    assert found.ttft_target_s == pytest.approx(0.2)
    assert found.tpot_target_s == pytest.approx(0.05)


def test_a_step_takes_at_most_its_share_of_the_ttft_target() -> None:
    host = learnt(LatencyTargets(ttft_s=0.1, tpot_s=0.1))
    host.step(100, 256, 0.036)
    tokens = host.decide().budget.tokens
    assert StepLimits().first_tokens <= tokens < 64


def test_some_requests_are_served_without_rollouts_so_that_what_is_unloaded_stays_known() -> None:
    host, shared = learnt(), []
    for _ in range(32):
        host.rest()
        name = host.arrive()
        host.now += 0.1
        host.governor.produced(host.now, name, 1)
        host.decode(name, 3)
        shared.append(host.decide().state == "shared")
        host.governor.ended(host.now, name, ok=True)
    assert shared.count(False) == 2


@pytest.mark.parametrize(("delay", "worth"), [(1.0, False), (0.2, True)])
def test_requests_are_slowed_down_only_where_sharing_brings_more_than_idle_time_would(
    delay: float, worth: bool
) -> None:
    """`delay`: of served tokens, per second of a rollout step beside them."""
    host, shared = learnt(), []
    for _ in range(320):
        host.now += 20.0  # so that there is idle time enough
        host.rest()
        name = host.arrive()
        host.now += 0.1
        host.governor.produced(host.now, name, 1)
        host.decode(name, 2)
        shared.append(host.decide().state == "shared")
        for _ in range(10 * shared[-1]):
            host.step(1)
            host.decode(name, 1, pause=0.01 + _STEP_S * (delay - 1.0))
        host.governor.ended(host.now, name, ok=True)
    assert shared[64:].count(True) == (240 if worth else 1)


def test_however_wide_the_target_a_request_is_slowed_down_by_little() -> None:
    host, pauses = learnt(LatencyTargets(ttft_s=10.0, tpot_s=1.0)), []
    name = host.arrive()
    host.now += 0.1
    host.governor.produced(host.now, name, 1)
    for _ in range(200):
        begin = host.now
        while (tokens := host.decide().budget.tokens) and host.now < begin + 0.01:
            host.step(1, tokens)
        host.decode(name, 1)
        pauses.append(host.now - begin)
    assert 1.05 < sum(pauses) / len(pauses) / 0.01 <= 1.55


def test_a_request_that_was_slowed_down_already_is_left_alone() -> None:
    host = learnt()
    name = host.arrive()
    host.now += 0.1
    host.governor.produced(host.now, name, 1)
    assert host.decide().state == "shared"
    host.decode(name, 1, pause=0.3)
    assert host.decide().state == "reclaimed"
    host.decode(name, 20, pause=0.01)
    assert host.decide().state == "shared"


def test_seen_from_outside_any_request_takes_everything_back() -> None:
    host = learnt()
    host.governor.observed(host.now, 2, 0)
    assert host.decide().budget.tokens == 0
    host.governor.observed(host.now, 0, 0)
    assert host.decide().state == "quiet"
    assert host.rest().budget.tokens


def test_an_arrived_request_waits_for_the_step_under_way_only_where_overlapping_does_harm() -> None:
    host = learnt()
    assert host.governor.hold_s(host.now, host.now - 0.001) == 0.0
    for _ in range(40):
        host.rest()
        name = host.arrive()
        host.now += 0.008
        host.governor.stepped(host.now, 32, 0.008)
        host.now += 0.142  # four times the overlap later than alone
        host.governor.produced(host.now, name, 1)
        host.governor.ended(host.now, name, ok=True)
    assert host.governor.hold_s(host.now, None) == 0.0
    assert 0.0 < host.governor.hold_s(host.now, host.now - 0.001) <= StepLimits().hold_s
    assert host.governor.hold_s(host.now, host.now - 1.0) == 0.0


def test_events_of_requests_that_are_not_inside_change_nothing() -> None:
    host = learnt()
    before = host.decide()
    host.governor.produced(host.now, "nobody", 1)
    host.governor.ended(host.now, "nobody", ok=False)
    assert host.decide() == before


def random_life(host: Host, seed: int) -> Iterator[BudgetDecision]:
    """Random events, a decision after each."""
    random, inside = Random(seed), list[str]()
    for _ in range(400):
        host.now += random.choice((0.0, 0.0005, 0.003, 0.01, 0.05, 0.4)) * random.random()
        what = random.random()
        if what < 0.15 and len(inside) < 20:
            inside.append(host.arrive(random.randrange(1, 3000)))
        elif what < 0.25 and inside:
            host.governor.ended(host.now, inside.pop(random.randrange(len(inside))), ok=random.random() < 0.8)
        elif what < 0.85 and inside:
            host.governor.produced(host.now, random.choice(inside), 1)
        else:
            host.governor.stepped(host.now, random.randrange(1, 257), random.choice((0.005, 0.01, 0.1)))
        yield host.decide()


def test_no_step_is_let_begin_that_is_predicted_to_take_more_than_the_slack() -> None:
    shared = 0
    for seed in range(30):
        host = learnt()
        for decision in random_life(host, seed):
            if decision.state == "shared":
                shared += 1
                within_slack(host, decision)
    assert shared > 100


def within_slack(host: Host, decision: BudgetDecision) -> None:
    governor, book = host.governor, host.governor._book
    end = decision.budget.until + governor._steps.predicted(decision.budget.tokens, beside=True) - 1e-9
    assert end <= host.now + decision.slack_s
    assert governor._aim < 0.1
    for one in book._waiting.values():
        assert end <= one.arrived + 0.4 - governor._unloaded.prefill_s(one.prompt_tokens)
    for one in book._decoding.values():
        due = min(one.last + 0.1, one.first + governor._aim * one.tokens)
        assert end <= due - governor._unloaded.decode_s(book.decoding)


@pytest.mark.parametrize("seed", range(30))
def test_no_decision_has_lapsed_or_lasts_longer_than_a_grant(seed: int) -> None:
    host = Host() if seed % 2 else learnt()
    for decision in random_life(host, seed):
        assert decision.review_at > host.now
        assert decision.review_at <= host.now + GRANT_S
        if decision.budget.tokens:
            assert host.now < decision.budget.until <= host.now + GRANT_S
            assert 0 < decision.budget.sequences <= decision.budget.tokens <= StepLimits().tokens


def test_no_decision_is_worth_an_endless_or_an_immediate_review() -> None:
    host = learnt()
    name = host.arrive()
    host.now += 0.1
    host.governor.produced(host.now, name, 1)
    decisions = 0
    while (decision := host.decide()).state == "shared":
        host.now, decisions = decision.review_at, decisions + 1
    assert decisions < 12


@pytest.mark.parametrize("seed", range(20))
def test_more_requests_or_longer_ones_never_give_a_larger_budget(seed: int) -> None:
    host, random = learnt(), Random(seed)
    for number, _ in enumerate(random_life(host, seed)):
        if number % 10:
            continue
        longer, short, none = deepcopy(host), deepcopy(host), deepcopy(host)
        longer.arrive(2000)
        short.arrive(1000)
        if random.random() < 0.3:
            longer.governor.produced(longer.now, str(longer.count), 1)
            short.governor.produced(short.now, str(short.count), 1)
        given = [one.decide().budget for one in (none, short, longer)]
        for more, fewer in pairwise(given):
            assert fewer.tokens <= more.tokens
            assert not fewer.tokens or fewer.until <= more.until + 0.0005  # a token's time: budgets are in whole ones


def test_a_step_of_load_is_answered_without_swinging() -> None:
    """From one moment on eight requests decode, and each rollout step delays their next token by itself."""
    host = learnt()
    names = [host.arrive() for _ in range(8)]
    host.now += 0.8
    for name in names:
        host.governor.produced(host.now, name, 1)
    given: list[float] = []
    for _ in range(300):
        end, granted = host.now + 0.011, 0.0
        while (budget := host.decide().budget).tokens and host.now < end:
            host.step(1, min(32, budget.tokens))
            end, granted = end + _STEP_S, granted + _STEP_S
        host.now = max(host.now, end)
        for name in names:
            host.governor.produced(host.now, name, 1)
        given.append(granted)
    spans = [sum(given[begin : begin + 10]) for begin in range(100, 300, 10)]
    assert min(spans) > 0
    assert max(spans) <= 1.25 * min(spans)


def test_a_rollout_may_wake_up_where_idle_time_is_long() -> None:
    host = Host()
    host.decide()
    host.now += 300.0
    assert host.governor.pays(host.now, 5.0)
    forecast = host.governor.learnt(host.now).forecast
    assert forecast.share > 0.9
    assert forecast.spell_s < inf


def test_what_ran_beside_requests_of_other_models_is_not_learnt_as_the_engine_alone() -> None:
    host = Host(LatencyTargets(ttft_factor=2.0, tpot_factor=2.0))
    for _ in range(30):
        host.serve()
        host.now += 1.0
    alone = host.governor.learnt(host.now)
    for joins in (False, True) * 30:  # before it came, or while it waited
        if not joins:
            host.governor.elsewhere(host.now, 1)
        name = host.arrive()
        if joins:
            host.governor.elsewhere(host.now, 1)
        host.now += 0.9
        host.governor.produced(host.now, name, 1)
        host.decode(name, pause=0.09)
        host.governor.ended(host.now, name, ok=True)
        host.governor.elsewhere(host.now, 0)
        host.now += 1.0
    beside = host.governor.learnt(host.now)
    assert beside.unloaded_ttft_s == pytest.approx(alone.unloaded_ttft_s)
    assert beside.unloaded_tpot_s == pytest.approx(alone.unloaded_tpot_s)


def test_steps_beside_requests_of_other_models_teach_nothing_of_steps_alone() -> None:
    host = Host()
    host.step(50)
    most = host.rest().budget.tokens
    host.governor.elsewhere(host.now, 1)
    host.now += 1.0
    host.step(50, seconds=3 * _STEP_S)
    host.governor.elsewhere(host.now, 0)
    host.now += 1.0
    assert host.rest().budget.tokens == most


def noisy(host: Host, pause: float) -> bool:
    """Serve a request whose tokens take `pause`. Returns whether it was shared."""
    host.now += 1.0
    host.rest()
    name = host.arrive()
    host.decide()
    host.now += 0.1
    host.governor.produced(host.now, name, 1)
    host.decode(name, 14, pause)
    shared = host.decide().state == "shared"
    host.decode(name, 6, pause)
    host.governor.ended(host.now, name, ok=True)
    return shared


def test_where_requests_come_near_their_target_by_themselves_nothing_is_shared_until_they_no_longer_do() -> None:
    host, random = learnt(LatencyTargets(ttft_s=1.0, tpot_s=0.014, aim_tpot=0.5)), Random(1)
    assert sum(noisy(host, 0.01) for _ in range(15)) >= 13
    disturbed = [noisy(host, random.uniform(0.0125, 0.01395)) for _ in range(40)]
    assert not any(disturbed[4:])
    calm = [noisy(host, 0.01) for _ in range(300)]
    assert sum(calm[200:]) >= 85


def test_requests_that_become_faster_may_not_be_slowed_down_by_more() -> None:
    host = learnt(LatencyTargets(ttft_s=1.0, tpot_s=0.03, aim_tpot=0.5))
    for _ in range(3):
        noisy(host, 0.028)  # so little is left to the target: at most this is the delay
    governor, slowed = host.governor, []
    for _ in range(100):
        noisy(host, 0.007)
        slowed.append(governor._aim - governor._unloaded.usual_decode_s)
    assert governor._unloaded.usual_decode_s < 0.008
    assert slowed[-1] < 0.0025


def test_steps_that_were_long_beside_served_work_once_are_tried_again() -> None:
    host = learnt(LatencyTargets(ttft_s=1.0, tpot_s=0.02, aim_tpot=0.5, aim_slowed=1.5))
    for _ in range(64):
        host.governor._steps.observe(32, 40 * _STEP_S, beside=True)
    shared = [noisy(host, 0.01) for _ in range(120)]
    assert not any(shared[:20])
    assert sum(shared[80:]) >= 30
