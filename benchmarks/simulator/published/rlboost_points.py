"""RLBoost (arXiv 2510.19225, NSDI'26): speed-ups by static instances, lost instances, and what its window is worth.

Engines are pairs of H100. Four of them live on the trainer's devices. Ratios compare the same steps of the same work.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import Final

import msgspec
from msgspec import Struct

from benchmarks.simulator.published.paper_hardware import published_engine
from benchmarks.simulator.published.paper_setting import FLUSH_S, PaperProfiles, PaperTimes, co_located, simulated
from benchmarks.simulator.published.published_point import Paper, PointKind, PublishedPoint, UnstatedValue, Use
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.engines.known_hardware import H100, QWEN3_8B, QWEN3_14B
from ebbtide.simulator.engines.roofline import ModelShape
from ebbtide.simulator.outcome import Outcome
from ebbtide.simulator.rivals.rlboost.rlboost_policy import RLBoostPolicy
from ebbtide.simulator.rivals.verl_policy import VerlPolicy
from ebbtide.simulator.scenario.draws.quantity_draws import curve
from ebbtide.simulator.scenario.fault_plan import PlannedFault
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.quantity_spec import LengthSpec, QuantitySpec
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.policy import Policy

_RUN: Final = "grpo"
_GPUS, _LOCAL, _LINK_GBPS = 2, 4, 50.0
_CAP: Final = 14_336
_SHORT_CAP: Final = 5_120
#: The first step shows a window that is not adapted yet.
_STEPS, _SKIPPED = 4, 1
#: Windows of the public code for one instance, for two, and so on (seconds).
_WINDOWS: Final[dict[str, tuple[int, ...]]] = {
    QWEN3_8B.name: (190, 160, 105, 70),
    QWEN3_14B.name: (346, 212, 145, 60, 8, 5),
}
#: Five of six instances are lost so late in the first step (seconds) that the next one opens with few.
_LOST_S: Final = 300.0
#: All points are averages over so many draws of the work: with one, a window that adapts to a few long responses moves
#: a speed-up by a tenth.
_SEEDS: Final = (0, 1, 2)
_TRACE: Final = "needs the segments of the trace, which are not published"


class _Run(Struct, frozen=True):
    """One simulation: the model and cap, and the remote instances."""

    model: ModelShape
    cap: int
    instances: int
    seeds: bool = True  # the trainer's devices generate, too
    steps: int = _STEPS


def _point(
    key: str, what: str, value: float, use: Use = Use.JUDGED, kind: PointKind = PointKind.VALUE
) -> PublishedPoint:
    return PublishedPoint(key=key, where="section 7", what=what, value=value, use=use, kind=kind)


def _left_out(what: str, value: float, reason: str) -> PublishedPoint:
    return PublishedPoint(key="", where="section 7", what=what, value=value, use=Use.LEFT_OUT, reason=reason)


class RLBoostPaper(Paper):
    name = "RLBoost"
    unstated: Sequence[UnstatedValue] = (
        UnstatedValue(name="mean_8b", value=2100, low=1700, high=2500, what="tokens of a response of Qwen3-8B"),
        UnstatedValue(name="mean_14b", value=3000, low=2400, high=3600, what="the same of Qwen3-14B"),
        UnstatedValue(name="sigma", value=0.8, low=0.6, high=1.2, what="spread of lengths (log-normal below the cap)"),
        UnstatedValue(name="correlation", value=0.95, low=0.5, high=0.99, what="of lengths within a group"),
        UnstatedValue(name="slowness", value=1.5, low=1.2, high=1.8, what="engines, as a multiple of the roofline"),
        UnstatedValue(
            name="sequence_ms", value=0.35, low=0.25, high=0.45, what="added to a step by each sequence (ms)"
        ),
        UnstatedValue(name="train_us", value=6.5, low=5.5, high=7.5, what="training per token and 1e9 parameters (us)"),
        UnstatedValue(name="snapshot_s", value=2.0, low=1.0, high=6.0, what="copying a version to the host (s)"),
        UnstatedValue(name="return_s", value=600, low=300, high=1200, what="between two lost instances' returns (s)"),
        UnstatedValue(name="theta", value=32, low=8, high=128, what="Theta, the most that wait in an engine"),
    )
    points: Sequence[PublishedPoint] = (
        _point("8b verl", "8B: veRL, generated and trained tokens/s", 10_000, Use.FITTED),
        _point("8b x1", "8B: 1 instance over veRL", 1.2),
        _point("8b x2", "8B: 2 instances over veRL", 1.4, Use.FITTED),
        _point("8b x3", "8B: 3 instances over veRL", 1.6),
        _point("8b x4", "8B: 4 instances over veRL", 1.8, Use.FITTED),
        _point("14b x1", "14B: 1 instance over veRL", 1.37, Use.FITTED),
        _point("14b x6", "14B: 6 instances over veRL", 2.25, Use.FITTED),
        _point("14b 5k", "14B, cap 5K: 3 instances over veRL", 1.47),
        _point("14b 5k helpful", "14B, cap 5K: instances that help (N_prem)", 3),
        _point("14b helpful", "14B, cap 14K: instances that help (N_prem)", 6),
        _point("kill 100", "14B: overhead saved by migration, 3 of 6 killed at 100 s", 0.33, kind=PointKind.SHARE),
        _point("kill 200", "14B: overhead saved by migration, 3 of 6 killed at 200 s", 0.76, kind=PointKind.SHARE),
        _point("unseeded", "14B: throughput lost without seeding, 5 of 6 lost", 0.19, kind=PointKind.SHARE),
        _left_out("8B: throughput over veRL, three segments", 1.66, _TRACE),
        _left_out("14B: throughput over veRL, three segments", 1.97, _TRACE),
        _left_out("32B: throughput over veRL, three segments", 1.51, _TRACE),
        _left_out("14B: gain by remembered windows", 0.06, _TRACE),
    )

    def simulated(self, unstated: Mapping[str, float], keys: frozenset[str] | None = None) -> dict[str, float]:
        measured = _Measurements(unstated)
        wanted = [point.key for point in self.points if point.use is not Use.LEFT_OUT]
        return {key: measured.of(key) for key in wanted if keys is None or key in keys}


#: The keys of speed-ups and of helpful instances, and what is simulated for them.
_SPEED_UPS: Final = {
    **{f"8b x{instances}": _Run(QWEN3_8B, _CAP, instances) for instances in (1, 2, 3, 4)},
    **{f"14b x{instances}": _Run(QWEN3_14B, _CAP, instances) for instances in (1, 6)},
    "14b 5k": _Run(QWEN3_14B, _SHORT_CAP, 3),
}
_HELPFUL: Final = {
    "14b 5k helpful": _Run(QWEN3_14B, _SHORT_CAP, 3),
    "14b helpful": _Run(QWEN3_14B, _CAP, 6),
}


class _Measurements:
    """Simulations with one setting of what is not stated; each is done once."""

    def __init__(self, unstated: Mapping[str, float]) -> None:
        self._unstated = unstated
        self._verl: dict[tuple[str, int], Sequence[Outcome]] = {}
        self._boosted: dict[_Run, Sequence[Outcome]] = {}

    def of(self, key: str) -> float:
        """The simulated value of a point."""
        if key in _SPEED_UPS:
            return self.speed_up(_SPEED_UPS[key])
        if key in _HELPFUL:
            return self.helpful(_HELPFUL[key])
        if key.startswith("kill "):
            return self.overhead_saved(float(key.removeprefix("kill ")))
        return self.lost_without_seeding if key == "unseeded" else self.tokens_per_s

    @property
    def tokens_per_s(self) -> float:
        outcomes = self._base(_Run(QWEN3_8B, _CAP, 0))
        tokens = sum(step.tokens for outcome in outcomes for step in outcome.steps[_SKIPPED:])
        return 2.0 * tokens / _lasted_s(outcomes)

    def speed_up(self, run: _Run) -> float:
        """Over veRL, in the same steps."""
        return _lasted_s(self._base(run)) / _lasted_s(self._boost(run))

    def helpful(self, run: _Run) -> float:
        """N_prem by the fluid form of Algorithm 1: engine-seconds of rollout by those of training.

        t_remote n + T_seed N_resv are the engine-seconds in which the step's rollouts are generated.
        """
        pools = [pool for outcome in self._boost(run) for pool in outcome.pools]
        busy_s = sum(pool.busy_s for pool in pools if pool.pool in {"spot", "local"})
        return busy_s / sum(pool.busy_s for pool in pools if pool.pool == f"{_RUN} trainer")

    def overhead_saved(self, at_s: float) -> float:
        """By migration instead of recomputing, of the time that a step loses when three of six are killed."""
        run = _Run(QWEN3_14B, _CAP, 6, steps=2)
        kill = (PlannedFault(kind="kill", pool="spot", step=1, at_s=at_s, machines=3),)
        spent = {True: 0.0, False: 0.0}
        for seed in _SEEDS:
            calm_s = _durations(self._simulate(run, self._policy(run), seed=seed))[1]
            for migrates in spent:
                policy = msgspec.structs.replace(self._policy(run), migrates=migrates)
                spent[migrates] += _durations(self._simulate(run, policy, kill, seed))[1] - calm_s
        return 1.0 - spent[True] / spent[False]

    @cached_property
    def lost_without_seeding(self) -> float:
        """Of the throughput over the steps after five of six instances were lost, while they come back one by one."""
        run = _Run(QWEN3_14B, _CAP, 6, steps=6)
        every_s = self._unstated["return_s"]
        faults = [
            PlannedFault(kind="kill", pool="spot", step=0, at_s=_LOST_S, back_s=every_s * index)
            for index in range(1, run.instances)
        ]
        policy = self._policy(run)
        unseeded = msgspec.structs.replace(run, seeds=False)
        spent = [_lasted_s([self._simulate(one, policy, faults, seed) for seed in _SEEDS]) for one in (run, unseeded)]
        return 1.0 - spent[0] / spent[1]

    def _base(self, run: _Run) -> Sequence[Outcome]:
        key = (run.model.name, run.cap)
        if key not in self._verl:
            training, profiles, local, _ = self._setting(run)
            fleet, policy = [co_located(local, _LOCAL, _RUN)], VerlPolicy()
            self._verl[key] = [simulated(fleet, training, policy, profiles, seed=seed) for seed in _SEEDS]
        return self._verl[key]

    def _boost(self, run: _Run) -> Sequence[Outcome]:
        if run not in self._boosted:
            policy = self._policy(run)
            self._boosted[run] = [self._simulate(run, policy, seed=seed) for seed in _SEEDS]
        return self._boosted[run]

    def _policy(self, run: _Run) -> RLBoostPolicy:
        windows = _WINDOWS[run.model.name]
        return RLBoostPolicy(
            pending_limit=round(self._unstated["theta"]),
            initial_window_s=windows[run.instances - 1],
            windows=" ".join(map(str, windows)),
        )

    def _simulate(self, run: _Run, policy: Policy, faults: Sequence[PlannedFault] = (), seed: int = 0) -> Outcome:
        training, profiles, local, remote = self._setting(run)
        fleet = [
            MachinePool(
                name="spot",
                kind="spot",
                engine=remote.name,
                workers=run.instances,
                slots=1024,
                boot_s=0.0,
                link_gbps=_LINK_GBPS,
                flush_s=FLUSH_S,
            )
        ]
        if run.seeds:
            fleet.append(co_located(local, _LOCAL, _RUN))
        return simulated(fleet, training, policy, profiles, faults=faults, seed=seed)

    def _setting(self, run: _Run) -> tuple[TrainingRun, PaperProfiles, EngineProfile, EngineProfile]:
        """The training run, profiles, and the engines on the trainer's devices and elsewhere."""
        known, model = self._unstated, run.model
        engine = partial(
            published_engine,
            model,
            H100,
            _GPUS,
            slowness=known["slowness"],
            sequence_s=known["sequence_ms"] / 1e3,
        )
        # The public code leaves so much of the trainer's devices to engines; elsewhere the engine's default holds.
        local = engine(memory_share=0.6)
        remote = engine(memory_share=0.9)
        remote = msgspec.structs.replace(remote, name=f"{remote.name}-remote")
        times = PaperTimes(token=known["train_us"] * 1e-6 * model.active / 1e9, snapshot=known["snapshot_s"])
        # Versions are of four bytes per parameter on the wire, as a log of the authors shows.
        profiles = PaperProfiles([local, remote], times, sent_gb=2.0 * model.bytes / 1e9)
        mean = known["mean_8b"] if model is QWEN3_8B else known["mean_14b"]
        training = TrainingRun(
            name=_RUN,
            trainer="paper",
            steps=run.steps,
            prompts=128,
            group=8,
            cap=run.cap,
            prompt_tokens=QuantitySpec(value=256),
            lengths=self._lengths(mean),
        )
        return training, profiles, local, remote

    def _lengths(self, mean: float) -> LengthSpec:
        """The same lengths under each cap: the mean is that under the longer one."""
        spec = LengthSpec(mean=mean, median=1.0, sigma=self._unstated["sigma"])
        median = curve(spec, {}, _CAP)(0.0)
        return LengthSpec(median=median, sigma=self._unstated["sigma"], correlation=self._unstated["correlation"])


def _durations(outcome: Outcome) -> list[float]:
    """Seconds of each step, from the one before."""
    ends = [outcome.steps[0].opened_s, *(step.trained_s for step in outcome.steps)]
    return [later - earlier for earlier, later in pairwise(ends)]


def _lasted_s(outcomes: Sequence[Outcome]) -> float:
    """Seconds of all steps but the skipped ones, over all outcomes."""
    return sum(sum(_durations(outcome)[_SKIPPED:]) for outcome in outcomes)
