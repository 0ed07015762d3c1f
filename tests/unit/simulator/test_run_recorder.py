"""A run's record: whole steps with their lengths, workers with their times, and a speed that was measured."""

import pytest
from msgspec.structs import replace

from ebbtide.errors import NotReady
from ebbtide.simulator.recording.run_recorder import WorkerLoad, measured_engine, record_run
from ebbtide.types.run import RunStatus
from tests.fakes.run_histories import BASE_S, ROLLOUT_S, history, span, version


def test_steps_that_are_over_are_kept_with_each_rollouts_group_prompt_and_length() -> None:
    recorded = record_run(*history())
    rows = recorded.rollouts
    assert rows.step == [0] * 4 + [1] * 4
    assert rows.group == [0, 0, 1, 1, 2, 2, 3, 3]
    assert rows.episode == list(range(8))
    assert rows.prompt == [100] * 8
    assert rows.length == [400] * 5 + [500] + [400] * 2
    assert rows.attempts == [1] * 5 + [2, 1, 1]
    assert (rows.begin_s[5], rows.end_s[5]) == (101.0, 150.0 + 300 * (BASE_S + ROLLOUT_S))
    assert (recorded.left_out.evaluation, recorded.left_out.unfinished, recorded.left_out.of_partial_steps) == (1, 0, 1)
    assert (recorded.spec.groups_per_step, recorded.spec.group_size, recorded.spec.steps) == (2, 2, 3)


def test_steps_have_their_begin_their_end_and_what_the_trainer_reported() -> None:
    first, second = record_run(*history()).steps
    assert (first.step, first.opened_s, first.announced_s) == (0, 10.0, 100.0)
    assert first.generated_s == pytest.approx(11.0 + 400 * (BASE_S + 2 * ROLLOUT_S))
    assert (second.train_s, second.publish_s, second.checkpoint_s) == (2.0, 0.5, 0.0)
    weights = record_run(*history()).weights
    assert (weights.dense, weights.sent) == (1_800_000_000, 300_000_000)


def test_training_beside_the_generation_of_its_own_step_is_left_out() -> None:
    run, spans, events, workers = history()
    streamed = [
        replace(event, values=event.values | {"overlapped_s": 1.5}) if event.kind == "step" else event
        for event in events
    ]
    assert [step.train_s for step in record_run(run, spans, streamed, workers).steps] == [0.5, 0.5]


def test_workers_have_their_kind_slots_and_presence_as_far_as_anybody_knows() -> None:
    first, second = record_run(*history()).workers
    assert (first.worker, first.kind, first.slots, first.most_running) == ("w1", "", 0, 2)
    assert (first.present, first.lost, first.drained) == ([(0.0, 120.0)], 1, 0)
    assert (second.worker, second.kind, second.slots) == ("w2", "spot", 8)
    assert (second.present, second.lost) == ([(2.0, None)], 0)
    assert first.tokens == 400 * 2 + 400 + 200


def test_the_engines_speed_is_that_of_the_attempts() -> None:
    run, spans, events, listed = history()
    engine = record_run(run, spans, events, listed).engine
    assert engine is not None
    assert (engine.base_s, engine.rollout_s) == pytest.approx((BASE_S, ROLLOUT_S), rel=0.1)
    assert engine.error_p90 < 0.1


def test_two_loads_tell_both_parts_of_a_step_exactly() -> None:
    alone, both = BASE_S + ROLLOUT_S, BASE_S + 2 * ROLLOUT_S
    loads = {
        "a": WorkerLoad([span("s0.g0.0", "a", 0.0, 100 * alone, 100)]),
        "b": WorkerLoad([span(f"s0.g0.{k}", "b", 0.0, 100 * both, 100) for k in (1, 2)]),
    }
    engine = measured_engine(loads)
    assert engine is not None
    assert (engine.base_s, engine.rollout_s, engine.attempts) == pytest.approx((BASE_S, ROLLOUT_S, 3))
    assert engine.error_p90 == pytest.approx(0.0, abs=1e-9)


def test_a_worker_twice_as_fast_is_known_as_such() -> None:
    run, spans, events, listed = history()
    spans = [
        replace(one, end_s=one.begin_s + (one.end_s - one.begin_s) / 2) if one.worker_id == "w2" else one
        for one in spans
    ]
    slow, fast = record_run(run, spans, events, listed).workers
    assert fast.speed / slow.speed == pytest.approx(2.0, rel=0.15)


def test_attempts_that_are_too_short_measure_nothing() -> None:
    assert measured_engine({"a": WorkerLoad([span("s0.g0.0", "a", 0.0, 1.0, 8)])}) is None
    assert measured_engine({}) is None


def test_a_worker_that_was_away_has_two_spells_and_one_whose_return_was_not_told_stays() -> None:
    from tests.fakes.run_histories import worker_event

    run, spans, events, listed = history()
    events += [
        worker_event("w2", "left", 60.0),
        worker_event("w2", "attached", 90.0),
        worker_event("w2", "lost", 140.0),
    ]
    _, second = record_run(run, spans, events, listed).workers
    assert (second.present, second.lost, second.drained) == ([(2.0, 60.0), (90.0, None)], 1, 1)


def test_steps_whose_attempts_the_store_dropped_are_left_out() -> None:
    run, spans, events, listed = history()
    dropped = [one for one in spans if one.end_s > 20.0]
    recorded = record_run(run, dropped, events, listed)
    assert set(recorded.rollouts.step) == {1}
    assert [step.step for step in recorded.steps] == [1]


def test_rollouts_without_a_step_fall_into_steps_in_the_order_of_their_groups() -> None:
    run, spans, events, listed = history()
    recorded = record_run(run, [replace(one, step=None) for one in spans], events, listed)
    assert recorded.rollouts.step == [0] * 4 + [1] * 4
    former = [replace(one, step=None, group_id="", episode_id="", prompt_tokens=0) for one in spans]
    assert len(record_run(run, former, events, listed).rollouts.step) == 8  # each a group of its own


def test_turns_of_an_episode_stay_together_in_their_order() -> None:
    run, _, events, listed = history()
    turns = [
        span(f"s0.g0.0.t{turn}", "w1", 11.0 + 10 * turn, 15.0 + 10 * turn, 100, group_id="s0.g0", episode_id="s0.g0.0",
             turn=turn, prompt_tokens=50 * (turn + 1), step=0)
        for turn in (0, 1, 2)
    ]  # fmt: skip
    rows = record_run(replace(run, counters={}), turns, events, listed).rollouts
    assert (rows.turn, rows.episode, rows.prompt) == ([0, 1, 2], [0, 0, 0], [50, 100, 150])


def test_a_run_without_a_whole_step_cannot_be_recorded_and_the_reason_is_told() -> None:
    run, spans, _, listed = history()
    with pytest.raises(NotReady, match="no step of it is over"):
        record_run(run, spans, [version(0, 10.0)], listed)
    ended = replace(run, status=RunStatus.FINISHED)
    assert set(record_run(ended, spans, [version(0, 10.0)], listed).rollouts.step) == {0, 1, 2}
    with pytest.raises(NotReady, match="the store no longer has the attempts of a whole step"):
        record_run(run, spans[-1:], [version(0, 10.0)], listed)
