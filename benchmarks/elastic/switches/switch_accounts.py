"""Counts from ledgers, timeline and logs what switches and kills cost: tokens lost, tokens made twice, and time."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Final

from msgspec import Struct

from benchmarks.elastic.switches.switch_run import FLUSH_TOKENS, MAX_TOKENS, ProgramKill, SwitchedRun
from ebbtide.demo.token_accounts import read_attempts
from ebbtide.types.fleet import EndCause
from ebbtide.types.run import AttemptSpan, RunEvent, RunStatus

#: A worker that ends so has lost what it had not sent. All other ends are planned, and cost nothing.
_UNANNOUNCED: Final = frozenset({EndCause.WORKER_LOST, EndCause.WORKER_SUSPECTED, EndCause.NOT_HELD})
#: The device is back after so many steps of the engine, in 99 of 100 cases.
MOST_STEPS: Final = 2
#: A switch so near to a kill, before or behind it, says nothing of undisturbed ones. A worker boots for so long.
_BEFORE_S: Final = 2.0
_BEHIND_S: Final = 45.0
#: From the kill of a guard until its successor has started and has waited for the device's owner.
_GUARD_S: Final = 45.0


class Switch(Struct, frozen=True):
    """The return of the device, from the guard's log. Times are seconds, `at` by the wall clock."""

    at: float
    compute_s: float  # until no engine computed
    memory_s: float  # until memory was given up
    steps: int  # of the engine that ended after the take-back
    step_s: float  # mean of the engine's steps in the spell before; 0: it made none


class SwitchFindings(Struct, kw_only=True):
    """What a run came to."""

    steps: int
    switches: int  # with an engine that had computed
    calm_switches: int  # among them, away from kills
    kills: dict[str, int]
    #: Of the calm ones: steps that the engine ended after the take-back. The engine counts them, so what else the
    #: machine does plays no part.
    switch_steps_p99: float | None
    #: The times have all delays of the processes in them. The first one is in mean steps of the spell before.
    switch_over_step_p99: float | None
    compute_s_p50: float | None
    compute_s_p99: float | None
    memory_s_p99: float | None  # until memory was given up too
    step_s_p50: float | None  # means of spells
    planned_cuts: int  # attempts handed over
    cuts_without_notice: int
    rollouts: int
    tokens_kept: int
    tokens_lost: int  # were stored, and a later attempt began before them; or are not in the response
    tokens_twice: int
    tokens_twice_on_planned_cuts: int  # of rollouts that were never cut without notice
    tokens_twice_most: int  # of one rollout, for each of its cuts without notice
    mixed_steps: int  # trained with a token of another version than the step's
    looks: int
    looks_with_both: int  # the trainer had the device, and an engine made steps
    unowned_s: float  # the longest time for which nobody could use the device, without a kill of its guard
    unowned_behind_kills_s: float
    took_s: float

    def failures(self) -> Iterator[str]:
        if self.switch_steps_p99 is not None and self.switch_steps_p99 > MOST_STEPS:
            yield f"the device came back after {self.switch_steps_p99:g} steps of the engine (p99)"
        if not self.planned_cuts:
            yield "no rollout was cut: windows were longer than generation, so nothing was measured"
        if self.tokens_lost:
            yield f"{self.tokens_lost} tokens were lost"
        if self.tokens_twice_on_planned_cuts:
            yield f"{self.tokens_twice_on_planned_cuts} tokens were made twice without a cut that came unannounced"
        if self.tokens_twice_most > FLUSH_TOKENS:
            yield f"{self.tokens_twice_most} tokens of a rollout were made twice for a cut; {FLUSH_TOKENS} may be"
        if self.mixed_steps:
            yield f"{self.mixed_steps} steps were trained on tokens of several versions"
        if self.looks_with_both:
            yield f"{self.looks_with_both} times an engine computed while the trainer had the device"
        if self.unowned_s > 1.0:
            yield f"for {self.unowned_s:.1f} s nobody could use the device, without a kill of its guard"


def findings(found: SwitchedRun) -> SwitchFindings:
    """Raises `RuntimeError` if the run did not end well."""
    _check_books(found)
    switches = [one for one in read_switches(found.guard_log) if one.step_s > 0.0]
    calm = [one for one in switches if not any(_near(one.at, kill) for kill in found.kills)]
    rollouts, tokens = _Rollouts(found.spans), _Tokens(found)
    outages = [(end - begin, _behind_guard(begin, found.kills)) for begin, end in found.watch.unowned]
    return SwitchFindings(
        steps=found.run.spec.trainer.steps,
        switches=len(switches),
        calm_switches=len(calm),
        kills={
            name: sum(kill.program == name for kill in found.kills) for name in {one.program for one in found.kills}
        },
        switch_steps_p99=_quantile([one.steps for one in calm], 99),
        switch_over_step_p99=_quantile([one.compute_s / one.step_s for one in calm], 99),
        compute_s_p50=_quantile([one.compute_s for one in calm], 50),
        compute_s_p99=_quantile([one.compute_s for one in calm], 99),
        memory_s_p99=_quantile([one.memory_s for one in calm], 99),
        step_s_p50=_quantile([one.step_s for one in calm], 50),
        planned_cuts=rollouts.planned,
        cuts_without_notice=sum(rollouts.unannounced.values()),
        rollouts=len(rollouts.chains),
        tokens_kept=tokens.kept,
        tokens_lost=rollouts.lost(),
        tokens_twice=sum(tokens.twice.values()),
        tokens_twice_on_planned_cuts=sum(
            count for name, count in tokens.twice.items() if not rollouts.unannounced.get(name)
        ),
        tokens_twice_most=max(
            (
                -(-count // rollouts.unannounced[name])
                for name, count in tokens.twice.items()
                if rollouts.unannounced.get(name)
            ),
            default=0,
        ),
        mixed_steps=sum(event.values.get("staleness_max", 0.0) > 0 for event in _steps(found.events)),
        looks=found.watch.looks,
        looks_with_both=len(found.watch.both),
        unowned_s=max((seconds for seconds, behind in outages if not behind), default=0.0),
        unowned_behind_kills_s=max((seconds for seconds, behind in outages if behind), default=0.0),
        took_s=round(found.took_s, 1),
    )


def read_switches(log: Path) -> list[Switch]:
    """The returns of the device that a guard, or several in turn, wrote into their log."""
    entries = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{") and line.endswith("}")]
    return [
        Switch(
            at=datetime.fromisoformat(one["timestamp"]).timestamp(),
            compute_s=one["compute_s"],
            memory_s=one["memory_s"],
            steps=one["steps"],
            step_s=one["step_s"],
        )
        for one in entries
        if one.get("event") == "device back"
    ]


class _Rollouts:
    """The attempts of each rollout of training, in their order."""

    def __init__(self, spans: Sequence[AttemptSpan]) -> None:
        self.chains = defaultdict[str, list[AttemptSpan]](list)
        self.unannounced = defaultdict[str, int](int)
        self.planned = 0
        for span in spans:
            if span.evaluation or span.request:
                continue
            self.chains[span.rollout_id].append(span)
            self.unannounced[span.rollout_id] += span.cause in _UNANNOUNCED
            self.planned += span.cause in {EndCause.MOVED, EndCause.WORKER_LEAVES}
        for chain in self.chains.values():
            chain.sort(key=lambda span: (span.begin_s, span.end_s))

    def lost(self) -> int:
        """Each attempt begins behind all tokens that were stored; the last one ends the response."""
        between = sum(
            max(0, before.last - after.first) for chain in self.chains.values() for before, after in pairwise(chain)
        )
        short = sum(MAX_TOKENS - chain[-1].last for chain in self.chains.values() if chain[-1].last < MAX_TOKENS)
        return between + short


class _Tokens:
    """What the workers' own ledgers say."""

    def __init__(self, found: SwitchedRun) -> None:
        attempts = read_attempts(found.ledgers, found.run.run_id)
        made = {name: sum(one.generated for one in chain) for name, chain in attempts.items()}
        self.kept = MAX_TOKENS * len(made)
        self.twice = {name: count - MAX_TOKENS for name, count in made.items()}


def _check_books(found: SwitchedRun) -> None:
    run = found.run
    counted = run.counters.get("trained", 0) + run.counters.get("dropped", 0)
    trained = {int(event.values["step"]) for event in _steps(found.events)}
    if run.status is not RunStatus.FINISHED or run.counters["submitted"] != counted:
        raise RuntimeError(f"the run did not end well: {run.status.name.lower()}, {run.message}, {dict(run.counters)}")
    if trained != set(range(1, run.spec.trainer.steps + 1)):
        raise RuntimeError(f"steps are missing: {sorted(trained)}")


def _steps(events: Sequence[RunEvent]) -> list[RunEvent]:
    return [event for event in events if event.kind == "step"]


def _near(at: float, kill: ProgramKill) -> bool:
    return kill.at - _BEFORE_S < at < kill.at + _BEHIND_S


def _behind_guard(at: float, kills: Sequence[ProgramKill]) -> bool:
    return any(kill.program == "trainer-guard" and kill.at - 1.0 < at < kill.at + _GUARD_S for kill in kills)


def _quantile(values: Sequence[float], share: int) -> float | None:
    if len(values) < 2:
        return None
    return round(quantiles(values, n=100, method="inclusive")[share - 1], 4)
