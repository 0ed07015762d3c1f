"""Simulates one rollout phase of one of Seer's settings under one policy.

Engines and lengths are those that `benchmarks/simulator/published` fitted to Seer's figures of veRL. All policies get
the same engines, the same lengths and, but for veRL, the same pool of keys and values.
"""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.log_level import errors_only
from benchmarks.long_tail.seer.published_ratios import Variant
from benchmarks.simulator.published.paper_setting import PaperProfiles, PaperTimes, co_located, simulated
from benchmarks.simulator.published.seer_points import (
    SETTINGS,
    SeerPaper,
    VerlUnstated,
    seer_engine,
    seer_run,
    unstated_of,
)
from ebbtide.simulator.rivals.tail.long_tail_policy import LongTailPolicy
from ebbtide.simulator.rivals.tail.seer_policy import SeerPolicy
from ebbtide.simulator.rivals.tail.speculating_verl import SpeculatingVerlPolicy
from ebbtide.simulator.rivals.verl_policy import VerlPolicy
from ebbtide.simulator.scenario.draws.workload import Workload
from ebbtide.simulator.scenario.inputs.input_tables import InputTables
from ebbtide.simulator.scenario.inputs.known_turns import KnownTurn, KnownTurns
from ebbtide.simulator.scenario.scenario import Scenario
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.policy import Policy

#: What draft tokens cost, as a multiple of the roofline: one value for all models, chosen by the three published
#: figures of speculation alone.
VERIFICATION: Final = 2.5
#: Groups of the step before that forecasts learn from, and how far its seed is from the step's.
_FORMER_GROUPS, _FORMER_SEED = 512, 100_000
OURS: Final = Variant("ebbtide", "learnt", speculates=True)
ORACLE: Final = Variant("ebbtide", "true_lengths", speculates=True)
UNTOLD: Final = Variant("ebbtide", "none", speculates=True)


class SeerWork(Struct, frozen=True, kw_only=True):
    """What is simulated."""

    model: str
    variant: Variant
    group: int = 0  # samples of a group; 0: as published
    scale: int = 1  # so many times fewer instances and prompts
    correlation: float | None = None  # of lengths in a group; None: as fitted
    slots: float = 1.0  # sequences that an engine runs at once, as a multiple of what was fitted
    seed: int = 0
    lengths: tuple[tuple[int, ...], ...] = ()  # recorded ones, by group, in place of drawn ones


class PlayedPhase(Struct, frozen=True, kw_only=True):
    """What one rollout phase came to."""

    total_s: float
    tail_s: float  # the last tenth of the responses alone
    tokens: int
    preemptions: int
    read_again: int
    generated: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total_s


def played(work: SeerWork) -> PlayedPhase:
    """Simulate it."""
    errors_only()
    setting, unstated = SETTINGS[work.model], _unstated(work)
    group = work.group or setting.group
    prompts = setting.prompts * setting.group // group // work.scale
    engine = seer_engine(setting, unstated)
    run = replace(seer_run(setting, unstated), prompts=prompts, group=group)
    fleet = [co_located(engine, setting.instances // work.scale, run.name)]
    tables = InputTables(known={run.name: _known(work, unstated)}) if work.lengths else InputTables()
    policy, profiles = policy_of(work, run), PaperProfiles([engine], PaperTimes())
    outcome = simulated(fleet, run, policy, profiles, seed=work.seed, tables=tables)
    step = outcome.steps[0]
    return PlayedPhase(
        total_s=step.generated_s - step.opened_s,
        tail_s=step.tail_s,
        tokens=step.tokens,
        preemptions=outcome.preemptions,
        read_again=outcome.tokens.reread,
        generated=outcome.tokens.generated,
    )


def policy_of(work: SeerWork, run: TrainingRun) -> Policy:
    """The policy that a variant names."""
    policy, order, speculates = work.variant
    drafts = {"speculates": speculates, "verification": VERIFICATION}
    match policy:
        case "verl":
            return SpeculatingVerlPolicy(verification=VERIFICATION) if speculates else VerlPolicy()
        case "seer":
            return SeerPolicy(order=order, **drafts)  # type: ignore[arg-type]
        case "ebbtide":
            former = _former(run, work) if order == "learnt" else ()
            return LongTailPolicy(knowledge=order, former=former, **drafts)  # type: ignore[arg-type]
    raise ValueError(f"there is no {policy!r}")


def _unstated(work: SeerWork) -> VerlUnstated:
    known = unstated_of(work.model, {one.name: one.value for one in SeerPaper.unstated})
    known = known._replace(sequences=max(1.0, known.sequences * work.slots))
    return known if work.correlation is None else known._replace(correlation=work.correlation)


def _former(run: TrainingRun, work: SeerWork) -> tuple[tuple[int, ...], ...]:
    """Lengths of a step before: drawn anew, or of recorded ones those that this step does not have."""
    if work.lengths:
        return ()
    drawn = Workload(Scenario(name=run.name, fleet=(), run=(run,)), work.seed + _FORMER_SEED)
    return tuple(
        tuple(drawn.turns(run.name, 0, prompt, sample)[0].response for sample in range(run.group))
        for prompt in range(min(run.prompts, _FORMER_GROUPS))
    )


def _known(work: SeerWork, unstated: VerlUnstated) -> KnownTurns:
    def turns(length: int) -> Sequence[KnownTurn]:
        return (KnownTurn(round(unstated.prompt), length, 0.0),)

    return KnownTurns(steps=(tuple(tuple(tuple(turns(one)) for one in group) for group in work.lengths),))
