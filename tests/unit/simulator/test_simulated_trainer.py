"""The simulated trainer deals samples as the real one does, and works on one thing after the other."""

from math import inf

from ebbtide.simulator.engines.simulated_trainer import SimulatedTrainer
from ebbtide.simulator.engines.trainer_profile import SampleLength, TrainerCosts, TrainerDelays, TrainerProfile


def profile(*, ranks: int = 1, micro: int = 100, **costs: float) -> TrainerProfile:
    return TrainerProfile(
        name="made-up",
        model="none",
        device="none",
        gpus=ranks,
        source="made up",
        costs=TrainerCosts(**{"token_s": 0.25, **costs}),
        ranks=ranks,
        micro_batch_tokens=micro,
        weights_gb=2.0,
        delays=TrainerDelays(snapshot_s=1.0, publish_s=3.0, publish_s_per_gb=0.5, checkpoint_s=2.0),
    )


def told(one: SimulatedTrainer, now: float) -> list[tuple[float, str, str]]:
    return [(event.at, event.kind.value, event.key) for event in one.advance(now)]


def test_samples_of_a_micro_batch_are_padded_to_the_longest() -> None:
    lengths = [SampleLength(length) for length in (10, 40, 50)]
    assert profile().gradient_s(lengths) == 0.25 * (2 * 40 + 50)
    assert profile(micro_batch_s=1.0).gradient_s(lengths) == 0.25 * 130 + 2.0
    assert profile(token_s=0.0, pair_s=0.5).gradient_s(lengths) == 0.5 * (2 * 800 + 1250)


def test_ranks_wait_for_the_slowest_in_each_micro_batch() -> None:
    lengths = [SampleLength(length) for length in (100, 60, 50)]
    # One rank has the first alone; the other has two micro-batches of one sample each, the shorter one first.
    assert profile(ranks=2).gradient_s(lengths) == 0.25 * (100 + 60)


def test_a_step_counts_its_optimiser_steps_epochs_and_further_forwards() -> None:
    one = profile(update_s=1.0, forward_share=0.5)
    assert one.step_s([50, 50]) == 25.0 + 1.0
    assert one.step_s([50, 50], updates=2) == 25.0 + 2.0
    assert one.step_s([50, 50], updates=2, epochs=3, forwards=1) == 3 * (37.5 + 2.0)


def test_the_same_key_shuffles_the_same_way() -> None:
    lengths = list(range(1, 60))
    assert profile().step_s(lengths, updates=4, seed="a") == profile().step_s(lengths, updates=4, seed="a")
    assert profile().step_s(lengths, updates=4, seed="a") != profile().step_s(lengths, updates=4, seed="b")


def test_work_is_done_in_its_order() -> None:
    one = SimulatedTrainer(profile(update_s=1.0), now=0.0)
    one.accumulate("first half", [40], now=0.0)
    one.accumulate("second half", [40], now=2.0)
    one.update("step", now=2.0)
    one.copy_weights("version", now=2.0)
    assert (one.next_event(), one.waiting) == (10.0, 4)
    assert told(one, 21.0) == [
        (10.0, "accumulated", "first half"), (20.0, "accumulated", "second half"), (21.0, "updated", "step"),
    ]  # fmt: skip
    one.save("checkpoint", now=21.5)
    assert told(one, 99.0) == [(22.0, "copied", "version"), (24.0, "saved", "checkpoint")]
    assert (one.busy_s, one.next_event(), one.profile.publish_s()) == (24.0, inf, 4.0)


def test_it_stands_still_while_it_is_held_and_loses_what_had_not_ended() -> None:
    one = SimulatedTrainer(profile(update_s=1.0), now=0.0, speed=2.0)
    one.train("step 1", [40], now=0.0)
    one.hold(2.0)
    assert one.next_event() == inf
    assert told(one, 50.0) == []
    one.go_on(102.0)
    one.train("step 2", [40], now=102.0)
    assert told(one, 106.0) == [(105.5, "trained", "step 1")]
    assert one.clear(106.0) == ["step 2"]
    assert (one.busy_s, one.next_event(), told(one, 200.0)) == (6.0, inf, [])
