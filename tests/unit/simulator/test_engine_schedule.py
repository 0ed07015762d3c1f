"""What the simulated engine does when, worked out by hand. A step takes a quarter of a second unless stated."""

from math import inf

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.simulator.engines.engine_profile import EngineProfile, StepCosts
from ebbtide.simulator.engines.simulated_engine import SimulatedEngine
from tests.unit.simulator.made_up_profiles import engine_profile


def engine(profile: EngineProfile | None = None, *, slots: int = 4, speed: float = 1.0) -> SimulatedEngine:
    return SimulatedEngine(profile or engine_profile(), slots=slots, now=0.0, speed=speed)


def admit(one: SimulatedEngine, key: str, *, now: float = 0.0, length: int = 4, prompt: int = 10) -> None:
    one.admit(key, prompt=prompt, made=0, length=length, now=now)


def told(one: SimulatedEngine, now: float) -> list[tuple[float, str, str]]:
    return [(event.at, event.kind.value, event.key) for event in one.advance(now)]


def test_the_first_token_comes_with_the_prompt_and_each_step_makes_another() -> None:
    one = engine()
    admit(one, "a")
    assert one.next_event() == 0.25
    assert told(one, 0.5) == [(0.25, "started", "a")]
    assert one.made("a") == 2
    assert told(one, 5.0) == [(1.0, "finished", "a")]
    assert (one.generated, one.read, one.busy_s, one.next_event()) == (4, 10, 1.0, inf)


def test_a_sequence_that_comes_in_the_middle_of_a_step_is_read_in_the_next_one() -> None:
    one = engine()
    admit(one, "a")
    admit(one, "b", now=0.3)
    assert told(one, 0.75) == [(0.25, "started", "a"), (0.75, "started", "b")]


def test_one_that_is_released_in_the_middle_of_a_step_loses_that_steps_token() -> None:
    one = engine()
    admit(one, "a")
    admit(one, "b")
    one.advance(0.6)  # the first step had begun with `a` alone
    assert one.remove("a", 0.6) == 2
    assert told(one, 0.75) == []
    assert (one.made("b"), one.generated) == (2, 4)


def test_a_long_prompt_is_read_in_parts_beside_the_tokens_of_others() -> None:
    one = engine(engine_profile(batched=101))
    admit(one, "a", length=8)
    admit(one, "b", now=0.3, prompt=250)
    assert told(one, 1.25) == [(0.25, "started", "a"), (1.25, "started", "b")]  # steps of 100, 100 and 50 tokens
    assert one.made("a") == 5


def test_one_slot_serves_one_after_the_other() -> None:
    one = engine(slots=1)
    admit(one, "a", length=2)
    admit(one, "b", length=1)
    assert (one.running, one.waiting) == (1, 1)
    assert told(one, 9.0)[1:] == [(0.5, "finished", "a"), (0.75, "started", "b"), (0.75, "finished", "b")]


def test_a_step_takes_the_sum_of_what_it_reads_and_computes() -> None:
    costs = StepCosts(base_s=1.0, weights_s=4.0, token_s=0.5, sequence_s=0.25, context_s=0.125, pair_s=0.0625)
    assert costs.step_s(batch=2, context=8) == 1.0 + 4.0 + 1.0 + 0.5 + 1.0
    assert costs.step_s(batch=2, context=8, prefill=10, pairs=16) == 1.0 + 4.0 + 6.0 + 0.5 + 1.0 + 1.0


def test_tokens_that_hide_behind_reading_the_weights_cost_nothing() -> None:
    costs = StepCosts(weights_s=1.0, token_s=0.5, sequence_s=0.25, spare=4)
    assert costs.step_s(batch=4, context=0) == 1.0
    assert costs.step_s(batch=6, context=0) == 1.0 + 2 * 0.75
    assert costs.step_s(batch=2, context=0, prefill=5) == 1.0 + 3 * 0.5


def test_a_step_reads_only_the_experts_that_its_tokens_use() -> None:
    costs = StepCosts(weights_s=1.0, experts_s=8.0, expert_share=0.5)
    assert [costs.step_s(batch=batch, context=0) for batch in (1, 2)] == [5.0, 7.0]
    assert costs.step_s(batch=1, context=0, prefill=1000) == pytest.approx(9.0)


def test_twice_the_speed_takes_half_the_time() -> None:
    one = engine(speed=2.0)
    admit(one, "a")
    assert told(one, 9.0)[-1] == (0.5, "finished", "a")


def test_the_youngest_is_preempted_when_memory_is_exhausted_and_re_prefilled() -> None:
    one = engine(engine_profile(tokens=4 * 16, prefix_cache=False))
    admit(one, "a", prompt=16, length=33)
    admit(one, "b", prompt=16, length=33)
    events = told(one, 100.0)
    # In its 18th step `a` needs its third block; there are four, and `b`, which came a step later, has two.
    assert events[2:4] == [(18 * 0.25 - 0.25, "preempted", "b"), (33 * 0.25, "finished", "a")]
    assert events[4] == (33 * 0.25 + 17 * 0.25, "finished", "b")  # its 16 tokens are read with the prompt
    assert (one.preemptions, one.reread, one.generated) == (1, 16 + 16, 66)


def test_samples_of_a_group_read_their_prompt_once() -> None:
    one = engine()
    for key in "abc":
        one.admit(key, prompt=100, made=0, length=5, now=0.0, prefix="group")
    one.advance(0.25)
    assert one.read == 100 + 2 * 4  # six blocks of 16 are shared
    assert one.kv_tokens == (6 + 3) * 16


def test_a_turn_reads_only_what_came_since_the_one_before() -> None:
    one = engine()
    one.admit("turn 1", prompt=100, made=0, length=5, now=0.0, prefix="group")
    one.advance(10.0)
    one.admit("turn 2", prompt=130, made=0, length=5, now=10.0, prefix="group", after=("turn 1",))
    one.advance(20.0)
    assert one.read == 100 + 130 - 96


def test_a_turn_finds_what_an_earlier_one_left_though_the_last_one_ran_elsewhere() -> None:
    one = engine()
    one.admit("turn 1", prompt=100, made=0, length=5, now=0.0)
    one.advance(10.0)
    one.admit("turn 3", prompt=300, made=0, length=5, now=10.0, after=("turn 2", "turn 1"))
    one.advance(20.0)
    assert one.read == 100 + 300 - 96


def test_other_weights_make_the_cache_worthless() -> None:
    one = engine()
    one.admit("a", prompt=100, made=0, length=50, now=0.0, prefix="group")
    one.advance(1.0)
    one.new_weights(1.0)
    one.admit("b", prompt=100, made=0, length=5, now=1.0, prefix="group")
    one.advance(2.0)
    assert one.read == 200
    assert one.made("a") == 8


def test_it_pauses_while_it_is_held() -> None:
    one = engine()
    admit(one, "a")
    one.hold(0.3)
    assert one.next_event() == 0.25  # not told yet
    assert told(one, 5.0) == [(0.25, "started", "a")]
    assert one.next_event() == inf
    admit(one, "b", now=6.0)
    one.go_on(10.3)
    assert told(one, 20.0) == [(10.75, "started", "b"), (11.0, "finished", "a"), (11.5, "finished", "b")]
    assert one.busy_s == 1.5


def test_a_killed_engine_tells_what_it_had_made_and_is_empty() -> None:
    one = engine(slots=1)
    admit(one, "a")
    admit(one, "b")
    assert one.clear(0.6) == [("a", 2), ("b", 0)]
    assert (one.running, one.waiting, one.generated, one.kv_tokens) == (0, 0, 2, 0)
    assert told(one, 9.0) == [(0.25, "started", "a")]


def test_a_response_of_a_billion_tokens_is_one_event() -> None:
    one = engine(engine_profile(costs=StepCosts(base_s=2.0**-10, context_s=2.0**-40), tokens=1 << 31))
    admit(one, "a", length=1_000_000_001)
    steps, context = 1_000_000_000, 10
    begin = one.next_event()
    one.advance(begin)
    assert one.next_event() == pytest.approx(
        begin + steps * (2.0**-10 + (context + 1) * 2.0**-40) + steps * (steps - 1) / 2 * 2.0**-40, rel=1e-12
    )


def test_being_asked_more_often_changes_nothing() -> None:
    costs = StepCosts(base_s=0.013, weights_s=0.011, token_s=1e-4, context_s=1e-7, pair_s=1e-9)
    rarely, often = (engine(engine_profile(costs=costs)) for _ in range(2))
    for one in (rarely, often):
        for place in range(9):
            admit(one, f"s{place}", now=place * 0.7, prompt=50 + place, length=200 + 17 * place)
            if one is often:
                seen = [event for tick in range(70) for event in told(one, place * 0.7 + tick * 0.01)]
                assert seen or place
    assert rarely.busy_s <= often.busy_s
    rest = told(often, 1000.0)
    assert told(rarely, 1000.0)[-len(rest) :] == rest


def test_a_sequence_that_could_not_run_even_alone_is_refused() -> None:
    one = engine(engine_profile(tokens=64))
    with pytest.raises(InvalidRequest, match=r"made-up: kv.tokens: 64 cannot hold a prompt of 50 and a response of 16"):
        admit(one, "a", prompt=50, length=16)
    admit(one, "b", prompt=50, length=15)
    assert told(one, 100.0)[-1][1] == "finished"


def test_steps_too_small_for_the_slots_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="batched_tokens: must be at least the 16 sequences"):
        engine(engine_profile(batched=15), slots=16)
    with pytest.raises(InvalidRequest, match="costs: a step must take time"):
        engine(engine_profile(costs=StepCosts()))
