"""What RollPacker's rounds begin with, abandon and defer."""

from collections.abc import Callable

import pytest

from benchmarks.rivals.rollpacker_policy import TailBatching
from ebbtide.simulator.world.training.step_rounds import Sample, StepRound


def batching(prompts: int = 4, group: int = 4, excess: float = 1.25) -> TailBatching:
    return TailBatching(prompts, group, prompt_excess=excess, response_excess=excess)


def finish(around: StepRound, rank: Callable[[Sample], int]) -> tuple[list[Sample], list[Sample]]:
    """Let samples end by rank until the step is complete: those that ended, and those that were abandoned."""
    left, ended = sorted(around.begin(), key=rank), list[Sample]()
    gone = list[Sample]()
    while left:
        sample = left.pop(0)
        change = around.ended(sample)
        ended.append(sample)
        gone += change.abandon
        left = [one for one in left if one not in change.abandon]
        if change.complete:
            assert not left
            return ended, gone
    raise AssertionError("the step was never complete")


def test_a_short_round_begins_with_more_prompts_and_more_responses() -> None:
    samples = batching(128, 8).open(0).begin()
    assert len({one.prompt for one in samples}) == 160
    assert len({one.sample for one in samples}) == 10
    assert len(samples) == 1600


def test_a_prompt_is_done_with_enough_responses_and_abandons_the_rest() -> None:
    around = batching().open(0)
    for sample in range(3):
        assert not around.ended(Sample(0, sample)).abandon
    change = around.ended(Sample(0, 3))
    assert change.abandon == [Sample(0, 4)]
    assert not change.complete


def test_a_step_is_complete_with_enough_prompts_and_defers_the_others() -> None:
    rounds = batching()
    around = rounds.open(0)
    ended, gone = finish(around, lambda one: one.sample * 100 + one.prompt)
    assert len(ended) + len(gone) == 5 * 5
    assert rounds.deferred() == (4,)
    assert {one.prompt for one in gone} == {0, 1, 2, 3, 4}


def test_a_long_round_runs_deferred_prompts_whole_and_draws_their_responses_anew() -> None:
    rounds = batching()
    for step in range(4):
        finish(rounds.open(step), lambda one: one.prompt * 100 + one.sample)
    assert len(rounds.deferred()) == 4
    oldest = rounds.deferred()
    samples = rounds.open(4).begin()
    assert tuple(dict.fromkeys(one.prompt for one in samples)) == oldest
    assert len(samples) == 4 * 4
    assert min(one.sample for one in samples) == 5  # behind those of the short round
    assert rounds.deferred() == ()


@pytest.mark.parametrize(("excess", "share"), [(1.125, 1 / 9), (1.25, 1 / 5), (1.5, 1 / 3)])
def test_the_share_of_long_rounds_follows_from_the_excess(excess: float, share: float) -> None:
    rounds, kinds = batching(8, 2, excess), []
    for step in range(90):
        kinds.append(len(rounds.deferred()) >= 8)
        finish(rounds.open(step), lambda one: one.prompt * 100 + one.sample)
    assert sum(kinds) / len(kinds) == pytest.approx(share, abs=0.02)


def test_no_prompt_is_lost_and_none_is_trained_twice() -> None:
    rounds, trained = batching(), []
    for step in range(20):
        around = rounds.open(step)
        begun = dict.fromkeys(one.prompt for one in around.begin())
        finish(around, lambda one: (one.prompt * 7919 + one.sample * 104_729) % 101)
        trained += [prompt for prompt in begun if prompt not in rounds.deferred()]
    assert len(trained) == len(set(trained)) == 20 * 4
    assert set(trained) | set(rounds.deferred()) == set(range(max(trained + list(rounds.deferred())) + 1))


def test_responses_alone_may_be_in_excess() -> None:
    rounds = TailBatching(4, 4, prompt_excess=1.0, response_excess=1.5)
    for step in range(3):
        assert len(rounds.open(step).begin()) == 4 * 6
        finish(rounds.open(step), lambda one: one.sample)
        assert rounds.deferred() == ()
