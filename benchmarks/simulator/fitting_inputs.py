"""Turns the observations of profile blocks into what profiles are fitted to.

An engine's time is observed as intervals of like steps, a trainer's as whole steps. Delays are medians over all blocks.
"""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final

from msgspec import Struct

from benchmarks.simulator.measured import Measured, MeasuredStep
from benchmarks.simulator.profile_block import EngineBlock, FirstTokens
from benchmarks.simulator.real_settings import ProfileBlock

#: Prompt tokens of a cell. With fewer, its first tokens tell how its prompts came in, and not how long it takes to read
#: them: each waits for the step that is under way.
_LEAST_READ: Final = 512


class StepInterval(Struct, frozen=True, kw_only=True):
    """Engine steps that followed each other. Those with `prefill` tokens read prompts, which attend to `pairs`."""

    seconds: float
    steps: float
    batch: int  # sequences that decode
    context: float = 0.0  # of these, in tokens, on average
    prefill: int = 0
    pairs: float = 0.0


class LearnedStep(Struct, frozen=True, kw_only=True):
    """One optimiser step."""

    seconds: float
    lengths: list[int]  # tokens of each sample, prompt included


class ClusterDelays(Struct, frozen=True, kw_only=True):
    """Seconds between the parts of a step, medians."""

    place_s: float  # from a version's announcement to its first placement, with pull and install
    pull_s: float
    pause_s: float  # of an install
    notice_s: float  # from the end of the last rollout to the trainer's begin
    publish_s: float  # from the trainer's end to the announcement
    first_token_s: float  # from the submission of one short prompt to an idle engine to its token


def step_intervals(blocks: Iterable[EngineBlock], *, whole_core: bool) -> list[StepInterval]:
    """Lists the intervals of the blocks of one kind of engine."""
    found: list[StepInterval] = []
    for block in blocks:
        if block.whole_core != whole_core:
            continue
        found += [
            StepInterval(seconds=one.seconds, steps=one.steps, batch=one.batch, context=one.context)
            for one in block.windows
        ]
        found += _reading(block.firsts)
    return found


def _reading(firsts: Sequence[FirstTokens]) -> list[StepInterval]:
    """Tells what reading prompts took: the time to all first tokens, less that of a single short prompt.

    The latter has the way through coordinator and worker in it, which is no engine's time. Cells with few prompt tokens
    are left out.
    """
    least = min(firsts, key=lambda one: one.concurrency * one.prompt)
    found = []
    for one in firsts:
        tokens = one.concurrency * one.prompt - least.concurrency * least.prompt
        if tokens >= _LEAST_READ and one.all_s > least.all_s:
            pairs = one.concurrency * one.prompt**2 / 2 - least.concurrency * least.prompt**2 / 2
            found.append(
                StepInterval(seconds=one.all_s - least.all_s, steps=1.0, batch=0, prefill=tokens, pairs=max(0.0, pairs))
            )
    return found


def learned_steps(blocks: Iterable[ProfileBlock]) -> list[LearnedStep]:
    """Lists the trainer's steps, without each run's first one, in which the trainer warms up."""
    return [
        LearnedStep(seconds=step.trainer["seconds_train"], lengths=sample_lengths(run, step.step))
        for block in blocks
        for run in block.trained
        for step in run.steps[1:]
    ]


def sample_lengths(run: Measured, step: int) -> list[int]:
    """Tokens of each sample of a step, prompt included."""
    return [run.setting.prompt_tokens + one.tokens for one in run.responses if one.step == step]


def cluster_delays(blocks: Sequence[ProfileBlock]) -> ClusterDelays:
    """Raises `ValueError` if the blocks have no trained steps."""
    runs = [run for block in blocks for run in block.trained]
    steps = [step for run in runs for step in run.steps[1:]]
    installs = [install for run in runs for install in run.installs]
    shortest = [min(block.engine.firsts, key=lambda one: one.concurrency * one.prompt) for block in blocks]
    if not steps or not installs:
        raise ValueError("the profile blocks have no trained steps; measure the session again")
    return ClusterDelays(
        place_s=median(step.first_s - step.opened_s for step in steps),
        pull_s=median(install.pull_s for install in installs),
        pause_s=median(install.pause_s for install in installs),
        notice_s=median(map(_notice_s, steps)),
        publish_s=median(step.trainer["publish_seconds"] for step in steps),
        first_token_s=median(one.all_s for one in shortest),
    )


def _notice_s(step: MeasuredStep) -> float:
    """What lies between the last rollout's end and the announcement, besides training and publishing."""
    behind = step.announced_s - step.generated_s
    return max(0.0, behind - step.trainer["seconds_train"] - step.trainer["publish_seconds"])
