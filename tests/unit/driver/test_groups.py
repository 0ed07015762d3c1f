"""Laws of a group's end, over all short histories of its samples."""

import itertools
import random

import pytest

from ebbtide.driver.steps import (
    MAX_TRIES,
    GroupDecision,
    GroupVerdict,
    SampleOutcome,
    SampleState,
    Setting,
    decide,
)

SETTINGS: tuple[Setting, ...] = ("replace", "shrink", "drop")
STATES = tuple(SampleState)


def all_groups(size: int) -> list[tuple[SampleOutcome, ...]]:
    samples = [SampleOutcome(state, tries) for state in STATES for tries in (1, MAX_TRIES)]
    return list(itertools.product(samples, repeat=size))


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_completed_group_is_exactly_its_scored_samples_and_at_least_two(setting: Setting) -> None:
    for group in all_groups(3):
        decision = decide(group, setting=setting)
        if decision.verdict is GroupVerdict.COMPLETE:
            assert decision.samples == tuple(i for i, s in enumerate(group) if s.state is SampleState.SCORED)
            assert len(decision.samples) >= 2
            assert all(s.state is not SampleState.RUNNING for s in group)


@pytest.mark.parametrize("setting", SETTINGS)
def test_it_waits_only_for_running_samples(setting: Setting) -> None:
    for group in all_groups(3):
        if decide(group, setting=setting).verdict is GroupVerdict.WAIT:
            assert any(s.state is SampleState.RUNNING for s in group)


@pytest.mark.parametrize("setting", SETTINGS)
def test_only_replace_tries_again_and_only_failed_samples_with_tries_left(setting: Setting) -> None:
    for group in all_groups(3):
        decision = decide(group, setting=setting)
        if decision.verdict is GroupVerdict.REPLACE:
            assert setting == "replace"
            assert decision.samples
            assert all(group[i] == SampleOutcome(SampleState.FAILED, 1) for i in decision.samples)


def test_drop_never_completes_a_group_that_lost_a_sample() -> None:
    for group in all_groups(3):
        if any(s.state is SampleState.FAILED for s in group):
            running = any(s.state is SampleState.RUNNING for s in group)
            assert decide(group, setting="drop") == GroupDecision(GroupVerdict.WAIT if running else GroupVerdict.DROP)


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_group_ends_whatever_fails(setting: Setting) -> None:
    rng = random.Random(7)
    for _ in range(500):
        group = [SampleOutcome() for _ in range(4)]
        for _turn in range(4 * MAX_TRIES + 1):
            decision = decide(group, setting=setting)
            if decision.verdict in {GroupVerdict.COMPLETE, GroupVerdict.DROP}:
                break
            for index in decision.samples:
                group[index] = SampleOutcome(tries=group[index].tries + 1)
            running = [i for i, s in enumerate(group) if s.state is SampleState.RUNNING]
            index = rng.choice(running)
            group[index] = group[index]._replace(state=rng.choice([SampleState.SCORED, SampleState.FAILED]))
        else:
            pytest.fail(f"undecided: {group}")


def test_replace_restores_the_full_size_when_no_sample_fails_too_often() -> None:
    group = [SampleOutcome(SampleState.SCORED, 1), SampleOutcome(SampleState.FAILED, MAX_TRIES - 1)]
    assert decide(group, setting="replace") == GroupDecision(GroupVerdict.REPLACE, (1,))
    group[1] = SampleOutcome(SampleState.SCORED, MAX_TRIES)
    assert decide(group, setting="replace") == GroupDecision(GroupVerdict.COMPLETE, (0, 1))
