"""Simulates two steps of one of Seer's settings under one policy, and tells what the second one's rollout came to.

Engines and lengths are those that `benchmarks/simulator/published` fitted to Seer's figures of veRL. All policies get
the same engines and the same lengths. Seer alone has a pool of keys and values, and drafts tokens. Ebbtide is the
simulator's policy: the coordinator's own rounds, which have learnt from the first step what groups tell of lengths.
"""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.log_level import errors_only
from benchmarks.long_tail.seer.published_ratios import Variant
from benchmarks.rivals.clairvoyant_policy import ClairvoyantPolicy
from benchmarks.rivals.tail.seer_policy import SeerPolicy
from benchmarks.rivals.tail.speculating_verl import SpeculatingVerlPolicy
from benchmarks.simulator.published.paper_setting import PaperProfiles, PaperTimes, co_located, simulated
from benchmarks.simulator.published.seer_points import (
    SETTINGS,
    SeerPaper,
    VerlUnstated,
    seer_engine,
    seer_run,
    unstated_of,
)
from ebbtide.simulator.scenario.input_tables import InputTables, KnownTurn, KnownTurns
from ebbtide.simulator.world.ebbtide_policy import EbbtidePolicy
from ebbtide.simulator.world.rival_policies import VerlPolicy
from ebbtide.simulator.world.simulation import Policy

#: What draft tokens cost, as a multiple of the roofline: one value for all models, chosen by the three published
#: figures of speculation alone.
VERIFICATION: Final = 2.5
#: The first teaches lengths.
_STEPS: Final = 2
#: Policies that look at engines' speeds hear of them so often.
_HEARTBEAT_S: Final = 5.0
OURS: Final = Variant("ebbtide", "lengths")
UNTOLD: Final = Variant("ebbtide", "submitted")
ORACLE: Final = Variant("clairvoyant", "true_lengths")


class SeerWork(Struct, frozen=True, kw_only=True):
    """What is simulated."""

    model: str
    variant: Variant
    group: int = 0  # samples of a group; 0: as published
    scale: int = 1  # so many times fewer instances and prompts
    correlation: float | None = None  # of lengths in a group; None: as fitted
    slots: float = 1.0  # sequences that an engine runs at once, as a multiple of what was fitted
    seed: int = 0
    lengths: tuple[tuple[int, ...], ...] = ()  # recorded ones, by group, in place of drawn ones; half for each step


class PlayedPhase(Struct, frozen=True, kw_only=True):
    """What one rollout phase came to."""

    total_s: float
    tail_s: float  # the last tenth of the responses alone
    tokens: int
    preemptions: int  # of both steps, as what follows
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
    run = replace(seer_run(setting, unstated), steps=_STEPS, prompts=prompts, group=group)
    if work.variant.policy == "ebbtide":
        run = replace(run, order=work.variant.order)
    fleet = [co_located(engine, setting.instances // work.scale, run.name)]
    tables = InputTables(known={run.name: _known(work, unstated)}) if work.lengths else InputTables()
    profiles = PaperProfiles([engine], PaperTimes())
    outcome = simulated(
        fleet, run, policy_of(work.variant), profiles, seed=work.seed, heartbeat_s=_HEARTBEAT_S, tables=tables
    )
    step = outcome.steps[-1]
    return PlayedPhase(
        total_s=step.generated_s - step.opened_s,
        tail_s=step.tail_s,
        tokens=step.tokens,
        preemptions=outcome.preemptions,
        read_again=outcome.tokens.reread,
        generated=outcome.tokens.generated,
    )


def policy_of(variant: Variant) -> Policy:
    """The policy that a variant names."""
    policy, order, speculates = variant
    match policy:
        case "verl":
            return SpeculatingVerlPolicy(verification=VERIFICATION) if speculates else VerlPolicy()
        case "seer":
            return SeerPolicy(order=order, speculates=speculates, verification=VERIFICATION)  # type: ignore[arg-type]
        case "ebbtide":
            return EbbtidePolicy()
        case "clairvoyant":
            return ClairvoyantPolicy()
    raise ValueError(f"there is no {policy!r}")


def _unstated(work: SeerWork) -> VerlUnstated:
    known = unstated_of(work.model, {one.name: one.value for one in SeerPaper.unstated})
    known = known._replace(sequences=max(1.0, known.sequences * work.slots))
    return known if work.correlation is None else known._replace(correlation=work.correlation)


def _known(work: SeerWork, unstated: VerlUnstated) -> KnownTurns:
    def turns(length: int) -> Sequence[KnownTurn]:
        return (KnownTurn(round(unstated.prompt), length, 0.0),)

    groups = [tuple(tuple(turns(one)) for one in group) for group in work.lengths]
    return KnownTurns(steps=tuple(tuple(groups[step::_STEPS]) for step in range(_STEPS)))
