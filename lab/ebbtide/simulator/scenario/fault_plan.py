"""Defines failures at named times, beside those that a pool has at random."""

from collections.abc import Sequence
from random import Random
from typing import Annotated, Literal

from msgspec import Meta, Struct

from ebbtide.simulator.scenario.bounds import Name, Seconds


class PlannedFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `[[fault]]`: what befalls machines of a pool, or a run's trainer.

    `kill`: they are gone without a word, so their silence tells. `crash`: their connections break at once. `drain`:
    they get a notice of `for_s` and then are gone. `freeze`: they do nothing for `for_s`. `partition`: nobody
    reaches them for `for_s`, and they stand still: a worker waits until its tokens are taken. `slow`: for `for_s`
    they work at `speed` times their speed. `trainer`: the trainer of `run` dies and is back after `for_s`, at its
    last checkpoint.
    """

    kind: Literal["kill", "crash", "drain", "freeze", "partition", "slow", "trainer"]
    at_s: Seconds  # of the scenario, or of the step if there is one
    step: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None  # counted from 0: `at_s` counts from its begin
    run: Name | None = None  # whose step, or whose trainer; not needed where the scenario has one run
    pool: Name | None = None
    machines: Annotated[int, Meta(ge=1, le=20_000)] = 1  # drawn by the seed from those that are there
    for_s: Seconds = 30.0
    speed: Annotated[float, Meta(ge=0.01, le=1)] = 0.5  # a machine that is slower yet is as good as frozen
    back_s: Seconds | None = None  # after which others take the place of those that are gone; none: never


def struck(fault: PlannedFault, index: int, present: Sequence[str], seed: int) -> list[str]:
    """Draw the machines that `fault`, the scenario's `index`-th, befalls. The order of `present` does not matter."""
    ordered = sorted(present)
    return sorted(Random(f"{seed} fault {index}").sample(ordered, min(fault.machines, len(ordered))))
