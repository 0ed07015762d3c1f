"""RLBoost (arXiv 2510.19225, NSDI'26): speed-ups by static instances, lost instances, and what its window is worth.

Engines are pairs of H100. Four of them live on the trainer's devices. Ratios compare the same steps of the same work.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from statistics import fmean
from typing import Final

import msgspec

from benchmarks.simulator.published.published_point import Paper, PointKind, PublishedPoint, UnstatedValue, Use
from benchmarks.simulator.published.rlboost_runs import CAP, BoostedRun, BoostUnstated, RunFigures, run_figures
from ebbtide.simulator.engines.roofline import QWEN3_8B, QWEN3_14B
from ebbtide.simulator.scenario.scenario import PlannedFault

_SHORT_CAP: Final = 5_120
#: The first step shows a window that is not adapted yet.
_SKIPPED: Final = 1
#: From T_init on, a window that nobody tuned is near its end after so many steps, of which so many are skipped.
_UNTUNED_STEPS, _UNTUNED_SKIPPED = 10, 7
#: Five of six instances are lost so late in the first step (seconds) that the next one opens with few.
_LOST_S: Final = 300.0
#: All points are averages over so many draws of the work: with one, a window that adapts to a few long responses moves
#: a speed-up by a tenth.
_SEEDS: Final = (0, 1, 2)
_TRACE: Final = "needs the segments of the trace, which are not published"


def _point(
    key: str, what: str, value: float, use: Use = Use.JUDGED, kind: PointKind = PointKind.VALUE
) -> PublishedPoint:
    return PublishedPoint(key=key, where="section 7", what=what, value=value, use=use, kind=kind)


def _left_out(what: str, value: float, reason: str) -> PublishedPoint:
    return PublishedPoint(key="", where="section 7", what=what, value=value, use=Use.LEFT_OUT, reason=reason)


class RLBoostPaper(Paper):
    name = "RLBoost"
    unstated: Sequence[UnstatedValue] = (
        UnstatedValue(name="mean_8b", value=4900, low=3400, high=5600, what="tokens of a response of Qwen3-8B"),
        UnstatedValue(name="mean_14b", value=4900, low=3400, high=6000, what="the same of Qwen3-14B"),
        UnstatedValue(name="sigma", value=0.6, low=0.4, high=1.0, what="spread of lengths (log-normal below the cap)"),
        UnstatedValue(name="correlation", value=0.9, low=0.3, high=0.99, what="of lengths within a group"),
        UnstatedValue(name="step_ms", value=1.0, low=0.0, high=8.0, what="added to a step beyond vLLM's (ms)"),
        UnstatedValue(name="sequence_ms", value=0.0825, low=0.0, high=0.3, what="added by each sequence (ms)"),
        # The public code's windows T are nearly those of T (n + 4) = W - n t_train with n instances, with 140 s of
        # training for 8B and 401 s for 14B. That is what these make of a step's tokens.
        UnstatedValue(
            name="train_us_8b", value=3.25, low=2.0, high=6.0, what="Qwen3-8B: training a token, per 1e9 weights (us)"
        ),
        UnstatedValue(name="train_us_14b", value=5.15, low=3.0, high=8.0, what="the same of Qwen3-14B"),
        UnstatedValue(name="snapshot_s", value=1.4, low=1.0, high=6.0, what="copying a version to the host (s)"),
        UnstatedValue(name="return_s", value=600, low=300, high=1200, what="between two lost instances' returns (s)"),
    )
    points: Sequence[PublishedPoint] = (
        _point("8b verl", "8B: veRL, tokens/s of prompts and responses", 10_000, Use.FITTED),
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
    **{f"8b x{instances}": BoostedRun(QWEN3_8B, CAP, instances) for instances in (1, 2, 3, 4)},
    **{f"14b x{instances}": BoostedRun(QWEN3_14B, CAP, instances) for instances in (1, 6)},
    "14b 5k": BoostedRun(QWEN3_14B, _SHORT_CAP, 3, steps=_UNTUNED_STEPS),
}
#: N_prem is an integer that the authors' rule finds while a run goes on. The speed-ups that the paper states beside
#: both are of as many instances, so the rule is read in these runs.
_HELPFUL: Final = {
    "14b 5k helpful": _SPEED_UPS["14b 5k"],
    "14b helpful": _SPEED_UPS["14b x6"],
}


class _Measurements:
    """Simulations with one setting of what is not stated."""

    def __init__(self, unstated: Mapping[str, float]) -> None:
        self._unstated = unstated

    def of(self, key: str) -> float:
        """The simulated value of a point."""
        if key in _SPEED_UPS:
            return self.speed_up(_SPEED_UPS[key])
        if key in _HELPFUL:
            return fmean(one.helpful for one in self._drawn(_HELPFUL[key]))
        if key.startswith("kill "):
            return self.overhead_saved(float(key.removeprefix("kill ")))
        return self.lost_without_seeding if key == "unseeded" else self.tokens_per_s

    @property
    def tokens_per_s(self) -> float:
        drawn = self._drawn(BoostedRun(QWEN3_8B, CAP, 0))
        return sum(sum(one.tokens[_SKIPPED:]) for one in drawn) / _lasted_s(drawn)

    def speed_up(self, run: BoostedRun) -> float:
        """Over veRL, in the same steps."""
        skipped = _UNTUNED_SKIPPED if run.steps == _UNTUNED_STEPS else _SKIPPED
        verl = BoostedRun(run.model, run.cap, 0, steps=run.steps)
        return _lasted_s(self._drawn(verl), skipped) / _lasted_s(self._drawn(run), skipped)

    def overhead_saved(self, at_s: float) -> float:
        """By migration instead of recomputing, of the time that a step loses when three of six are killed."""
        calm = BoostedRun(QWEN3_14B, CAP, 6, steps=2)
        kill = (PlannedFault(kind="kill", pool="spot", step=1, at_s=at_s, machines=3),)
        lost = {
            migrates: sum(
                hit.steps_s[1] - one.steps_s[1]
                for hit, one in zip(
                    self._drawn(msgspec.structs.replace(calm, faults=kill, migrates=migrates)),
                    self._drawn(calm),
                    strict=True,
                )
            )
            for migrates in (True, False)
        }
        return 1.0 - lost[True] / lost[False]

    @cached_property
    def lost_without_seeding(self) -> float:
        """Of the throughput over the steps after five of six instances were lost, while they come back one by one."""
        every_s = self._unstated["return_s"]
        faults = tuple(
            PlannedFault(kind="kill", pool="spot", step=0, at_s=_LOST_S, back_s=every_s * index)
            for index in range(1, 6)
        )
        run = BoostedRun(QWEN3_14B, CAP, 6, steps=6, faults=faults)
        unseeded = msgspec.structs.replace(run, seeds=False)
        return 1.0 - _lasted_s(self._drawn(run)) / _lasted_s(self._drawn(unseeded))

    def _drawn(self, run: BoostedRun) -> Sequence[RunFigures]:
        known = self._unstated
        size = "8b" if run.model is QWEN3_8B else "14b"
        values = [known[name] if name in known else known[f"{name}_{size}"] for name in BoostUnstated._fields]
        unstated = BoostUnstated(*values)
        return [run_figures(run, unstated, seed) for seed in _SEEDS]


def _lasted_s(drawn: Sequence[RunFigures], skipped: int = _SKIPPED) -> float:
    """Seconds of all steps but the skipped ones, over all draws."""
    return sum(sum(one.steps_s[skipped:]) for one in drawn)
