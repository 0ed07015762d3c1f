"""Reads a result of the co-serving benchmark, and fits a pair's costs to each of its scenes.

Costs come from the runs of each engine alone. What overlapping steps do to each other is not seen there: it is taken
from `unguarded`, where rollouts always run, so that policy is not judged. Without it both engines are taken to share
the device evenly.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.pair.virtual.compared_policies import serving_policy
from benchmarks.pair.virtual.pair_costs import PairCosts, PairMemory
from benchmarks.pair.virtual.pair_costs_fit import MeasuredRequest, StepSample, fit_rollout_steps, fit_served
from benchmarks.pair.virtual.rollout_batch import RolloutShape
from benchmarks.pair.virtual.served_engine import ServedCall
from benchmarks.pair.virtual.serving_policies import latency_percentile, served_tpot
from ebbtide.demo.coserving.request_traffic import TrafficRequest
from ebbtide.errors import InvalidRequest
from ebbtide.serving_guard.governor.budget_decider import LatencyTargets

#: Speeds beside the other engine are looked for from here to 1, as parts of an engine's own, to within 2 %.
_SLOWEST: Final = 0.02
_HALVINGS: Final = 6
FITTED_ON: Final = "unguarded"


class RolloutsAlone(Struct, frozen=True):
    """The rollout engine by itself."""

    tokens_per_s: float
    step_s: float
    samples: list[StepSample]


class AloneRun(Struct, frozen=True):
    """Each engine of a pair by itself."""

    served: list[list[MeasuredRequest]]
    rollouts: RolloutsAlone


class PairSetting(Struct, frozen=True):
    """What all measurements of a pair have in common."""

    slots: int
    step_tokens: int
    kv_mib: int
    serving_kv_mib: int
    memory_mib: int
    token_bytes: int
    prompt: int
    response: tuple[int, int]

    @property
    def shape(self) -> RolloutShape:
        return RolloutShape(prompt=self.prompt, shortest=self.response[0], longest=self.response[1])

    @property
    def costs(self) -> PairCosts:
        """Limits of both engines; durations are yet to be fitted."""
        memory = PairMemory(
            limit_mib=self.memory_mib,
            serving_kv_mib=self.serving_kv_mib,
            served_token_bytes=self.token_bytes,
            rollout_kv_mib=self.kv_mib,
            rollout_token_bytes=self.token_bytes,
        )
        return PairCosts(slots=self.slots, step_tokens=self.step_tokens, memory=memory)


class MeasuredResult(Struct, frozen=True):
    """The parts of a result file that are read here. `cells`: a row for each policy of each scene."""

    cells: list[dict[str, Any]]
    alone_runs: dict[str, AloneRun]
    pair: PairSetting
    conditions: dict[str, Any] = {}

    def rows(self, scene: str) -> list[dict[str, Any]]:
        return [one for one in self.cells if one["scene"] == scene]


def read_result(path: Path) -> MeasuredResult:
    """Read a result file. Raises `InvalidRequest` if it is none, or if it was written before it had what is needed."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=MeasuredResult)
    except OSError as error:
        message = f"cannot be read ({error.strerror}); `make bench-coserving` writes one"
        raise InvalidRequest(message, field=str(path)) from None
    except msgspec.DecodeError as error:
        message = f"is no result of `make bench-coserving` that keeps its runs alone: {error}"
        raise InvalidRequest(message, field=str(path)) from None


def fitted_costs(result: MeasuredResult, scene: str) -> PairCosts:
    """The costs of a scene's pair, with residuals."""
    run = result.alone_runs[scene]
    step_s, token_s = fit_rollout_steps(run.rollouts.samples)
    costs = replace(result.pair.costs, step_s=step_s, step_token_s=token_s, source=f"benchmarks/coserving.py, {scene}")
    interval_s = costs.slots / run.rollouts.tokens_per_s
    costs = replace(costs, between_s=max(0.0, interval_s - run.rollouts.step_s))
    return fitted_beside(result, scene, fit_served(run.served, costs))


def fitted_beside(result: MeasuredResult, scene: str, costs: PairCosts) -> PairCosts:
    """`costs` with the speeds of both engines beside each other, at which the unguarded pair has the measured median
    time per token and harvest; as they are where that was not measured."""
    both = next((one for one in result.rows(scene) if one["policy"] == FITTED_ON), None)
    if both is None or not both["tpot_p50_ms"]:
        return costs

    def tpot_ms(part: float) -> float:
        calls, _ = played_blocks(result, scene, replace(costs, serving_beside=part), FITTED_ON)
        return 1e3 * latency_percentile(served_tpot(calls), 50)

    serving = _search(lambda part: tpot_ms(part) <= both["tpot_p50_ms"])
    beside = replace(costs, serving_beside=serving)

    def tokens_per_s(part: float) -> float:
        return played_blocks(result, scene, replace(beside, rollouts_beside=part), FITTED_ON)[1]

    return replace(beside, rollouts_beside=_search(lambda part: tokens_per_s(part) >= both["rollout_tokens_per_s"]))


def played_blocks(
    result: MeasuredResult,
    scene: str,
    costs: PairCosts,
    name: str,
    *,
    targets: LatencyTargets | None = None,
    seed: int = 0,
) -> tuple[list[ServedCall], float]:
    """What was served under a policy, and its rollout tokens/s. Each block begins with a guard that knows nothing, as
    the real one does."""
    calls: list[ServedCall] = []
    tokens, seconds = 0, 0.0
    blocks = result.alone_runs[scene].served
    for number, block in enumerate(blocks):
        requests = [TrafficRequest(one.sent, one.prompt, one.output) for one in block]
        policy = serving_policy(name, costs)
        pair = policy.play(
            requests, costs, targets or LatencyTargets(), seed=seed * len(blocks) + number, shape=result.pair.shape
        )
        pair.run()
        calls, tokens, seconds = calls + pair.done, tokens + pair.harvested, seconds + pair.now
    return calls, tokens / max(seconds, 1e-9)


def _search(enough: Callable[[float], bool]) -> float:
    """The least part of an engine's speed that is enough; 1 if none is."""
    low, high = _SLOWEST, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
