"""Defines a scenario: a fleet, the runs on it, what befalls them, and the policy that decides."""

from collections.abc import Sequence
from random import Random
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from ebbtide.simulator.scenario.input_tables import InputTables, PriceTable, fixed_price
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.quantity_spec import Gbps, Label, Name, Seconds
from ebbtide.simulator.scenario.training_run import TrainingRun


class PlannedFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault at a named time, of machines of a pool or of a run's trainer."""

    #: `"kill"`: machines are gone silently, as when power fails. `"crash"`: their connections break at once. `"drain"`:
    #: they get a notice of `for_s` and then are gone. `"freeze"`: they do nothing for `for_s`. `"partition"`: nobody
    #: reaches them for `for_s`, and generation pauses there, since a worker waits until its tokens are acknowledged.
    #: `"slow"`: they work at `speed` for `for_s`. `"trainer"`: the trainer of `run` dies, and is back after `for_s` at
    #: its last checkpoint.
    kind: Literal["kill", "crash", "drain", "freeze", "partition", "slow", "trainer"]
    at_s: Seconds  # from the start of the scenario, or of `step`
    step: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None  # step, counted from 0, from whose start `at_s` counts
    run: Name | None = None  # whose step, or whose trainer; not needed where the scenario has one run
    pool: Name | None = None  # whose machines; not needed where the scenario has one pool
    machines: Annotated[int, Meta(ge=1, le=20_000)] = 1  # how many, drawn by the seed from those that are there
    for_s: Seconds = 30.0  # length of a freeze, partition, slow time or notice, or of a trainer's absence
    speed: Annotated[float, Meta(ge=0.01, le=1)] = 0.5  # of slow machines, as a share of their own
    back_s: Seconds | None = None  # after which others replace those that are gone; none: never


def struck(fault: PlannedFault, index: int, present: Sequence[str], seed: int) -> list[str]:
    """Draw the machines that `fault`, the scenario's `index`-th, befalls. The order of `present` does not matter."""
    ordered = sorted(present)
    return sorted(Random(f"{seed} fault {index}").sample(ordered, min(fault.machines, len(ordered))))


#: Where only steps end a scenario, it is given up after so many hours: a fleet may stay empty for ever.
LONGEST_H: Final = 1_000.0


class PolicyChoice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who decides: Ebbtide's own code, or a rival by name. Each policy checks its own parameters."""

    name: Name = "ebbtide"  # see the table below
    params: dict[str, bool | int | float | str] = {}  # parameters of the policy


class ScenarioSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A scenario as its file states it."""

    name: Label  # for reports
    #: A scenario in the same folder. Its top-level keys hold where this file does not state them; `[[fleet]]`,
    #: `[[run]]` and `[[fault]]` of this file replace all of that one's.
    extends: str = ""
    #: Virtual hours after which the simulation ends, if not by `steps` first. One of both is required; without `hours`
    #: the simulation is given up after 1,000 h.
    hours: Annotated[float, Meta(gt=0, le=LONGEST_H)] | None = None
    steps: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None  # of each run that states no number itself
    fleet: Annotated[tuple[MachinePool, ...], Meta(min_length=1, max_length=100)]
    run: Annotated[tuple[TrainingRun, ...], Meta(min_length=1, max_length=200)]
    fault: Annotated[tuple[PlannedFault, ...], Meta(max_length=1_000)] = ()
    policy: PolicyChoice = PolicyChoice()
    relay_gbps: Gbps = 200.0  # the link of the relay from which workers pull versions

    @property
    def until_s(self) -> float:
        """The scenario's last second, even if steps are left."""
        return (self.hours if self.hours is not None else LONGEST_H) * 3600.0

    def steps_of(self, run: TrainingRun) -> int | None:
        """How many steps end the run; None: time alone ends it."""
        return run.steps if run.steps is not None else self.steps


class Scenario(ScenarioSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A scenario with the tables of all files that it names."""

    folder: str = "."  # paths in it are relative to this one
    tables: InputTables = InputTables()

    def price(self, pool: MachinePool) -> PriceTable:
        """What a machine of the pool costs."""
        return self.tables.prices[pool.prices] if pool.prices is not None else fixed_price(pool.price_per_hour)


def is_path(reference: str) -> bool:
    """Whether a profile is named by its file, which ends in .toml."""
    return reference.endswith(".toml")
