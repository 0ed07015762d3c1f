"""Seer (arXiv 2511.14617 v3, OSDI'26): what it measured of veRL on three models."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import fmean
from typing import Final, NamedTuple

from benchmarks.simulator.published.observed_verl import ObservedVerl
from benchmarks.simulator.published.paper_hardware import published_engine
from benchmarks.simulator.published.paper_setting import PaperProfiles, PaperTimes, co_located, simulated
from benchmarks.simulator.published.published_point import Paper, PointKind, PublishedPoint, UnstatedValue, Use
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.engines.roofline import H800, KIMI_K2, MOONLIGHT, QWEN2_VL_72B, ModelShape
from ebbtide.simulator.outcome import Outcome
from ebbtide.simulator.scenario.quantity_spec import LengthSpec, QuantitySpec
from ebbtide.simulator.scenario.training_run import TrainingRun

_RUN: Final = "grpo"
#: The paper averages five iterations, and so many draws of the work are averaged here: single ones differ by a tenth of
#: the rollout in the share of the tail.
_SEEDS: Final = (0, 1, 2, 3, 4)


class SeerSetting(NamedTuple):
    model: ModelShape
    gpus: int  # of an instance
    instances: int
    prompts: int
    group: int
    mean: float  # tokens of a response
    cap: int
    ranks: int = 1  # data-parallel ones in an instance, each with its own limit of sequences


class VerlUnstated(NamedTuple):
    """Of one model; the paper's `unstated` says what each is."""

    slowness: float
    sigma: float
    correlation: float
    sequences: float
    memory_share: float
    prompt: float


SETTINGS: Final = {
    "qwen": SeerSetting(QWEN2_VL_72B, 8, 16, 600, 16, 7_615, 40_960),
    "moonlight": SeerSetting(MOONLIGHT, 1, 32, 400, 8, 22_386, 65_536),
    "k2": SeerSetting(KIMI_K2, 32, 8, 800, 8, 38_959, 98_304, ranks=32),
}
_SPECULATES = "needs speculative decoding, which is not modelled"
_KV_POOL = "needs keys and values that move between instances through a pool, which is not modelled"
_ORACLE = "needs StreamRL's rule of buckets, which neither paper states with numbers"


def _left_out(key: str, where: str, what: str, value: float, reason: str) -> PublishedPoint:
    return PublishedPoint(key=key, where=where, what=what, value=value, use=Use.LEFT_OUT, reason=reason)


class SeerPaper(Paper):
    """Whole groups dealt to instances in turn, co-located and synchronous."""

    name = "Seer"
    unstated: Sequence[UnstatedValue] = (
        UnstatedValue(
            name="slowness_qwen",
            value=1.75,
            low=1.5,
            high=2.3,
            what="Qwen2-VL-72B's engine, as a multiple of the roofline",
        ),
        UnstatedValue(name="slowness_moonlight", value=1.35, low=1.1, high=1.7, what="the same of Moonlight"),
        UnstatedValue(name="slowness_k2", value=3.75, low=3.2, high=4.8, what="the same of Kimi-K2"),
        UnstatedValue(name="sigma", value=1.6, low=1.2, high=1.8, what="spread of lengths (log-normal below the cap)"),
        UnstatedValue(name="correlation", value=0.95, low=0.5, high=0.99, what="of lengths within a group"),
        UnstatedValue(name="sequences", value=176, low=96, high=512, what="that run at once on an engine's rank"),
        UnstatedValue(name="memory_share", value=0.6, low=0.5, high=0.9, what="of devices, for weights and cache"),
        UnstatedValue(name="prompt", value=512, low=256, high=2048, what="tokens of a prompt"),
    )
    points: Sequence[PublishedPoint] = (
        PublishedPoint(
            key="qwen total", where="section 2", what="Qwen2-VL-72B: rollout (s)", value=3957, use=Use.FITTED
        ),
        PublishedPoint(
            key="moonlight total", where="section 2", what="Moonlight: rollout (s)", value=3910, use=Use.FITTED
        ),
        PublishedPoint(key="k2 total", where="section 2", what="Kimi-K2: rollout (s)", value=12_202, use=Use.FITTED),
        PublishedPoint(
            key="qwen preemptions",
            where="section 2",
            what="Qwen2-VL-72B: preemptions",
            value=13_686,
            kind=PointKind.COUNT,
            use=Use.FITTED,
        ),
        PublishedPoint(
            key="qwen late start",
            where="section 2",
            what="Qwen2-VL-72B: mean start of the last 5 % to end",
            value=0.42,
            kind=PointKind.SHARE,
            use=Use.FITTED,
        ),
        PublishedPoint(
            key="qwen tail",
            where="section 2",
            what="Qwen2-VL-72B: share of the tail",
            value=0.58,
            kind=PointKind.SHARE,
        ),
        PublishedPoint(
            key="qwen idle", where="section 2", what="Qwen2-VL-72B: idle share", value=0.37, kind=PointKind.SHARE
        ),
        PublishedPoint(
            key="qwen gap",
            where="section 2",
            what="Qwen2-VL-72B: between the first and the last instance's end",
            value=0.70,
            kind=PointKind.SHARE,
        ),
        PublishedPoint(
            key="moonlight tail",
            where="section 2",
            what="Moonlight: share of the tail",
            value=0.46,
            kind=PointKind.SHARE,
        ),
        PublishedPoint(
            key="k2 tail", where="section 2", what="Kimi-K2: share of the tail", value=0.26, kind=PointKind.SHARE
        ),
        _left_out("", "ablation", "Moonlight: divided rollout over veRL", 1.41, _KV_POOL),
        _left_out("", "ablation", "Qwen2-VL-72B: divided rollout over veRL", 1.42, _KV_POOL),
        _left_out("", "ablation", "Kimi-K2: divided rollout over veRL", 1.16, _KV_POOL),
        _left_out("", "ablation", "Qwen2-VL-72B: with grouped speculation over veRL", 2.04, _SPECULATES),
        _left_out("", "baselines", "Qwen2-VL-72B: StreamRL-Oracle over veRL", 1.43, _ORACLE),
    )

    def simulated(self, unstated: Mapping[str, float], keys: frozenset[str] | None = None) -> dict[str, float]:
        found: dict[str, float] = {}
        for name in SETTINGS:
            if keys is None or any(key.startswith(f"{name} ") for key in keys):
                known = unstated_of(name, unstated)
                drawn = [_rollout(name, known, seed) for seed in _SEEDS]
                found |= {f"{name} {key}": fmean(one[key] for one in drawn) for key in drawn[0]}
        return found


def unstated_of(name: str, unstated: Mapping[str, float]) -> VerlUnstated:
    """What the paper does not state of one model."""
    return VerlUnstated(unstated[f"slowness_{name}"], *(unstated[one] for one in VerlUnstated._fields[1:]))


def seer_engine(setting: SeerSetting, unstated: VerlUnstated) -> EngineProfile:
    """One instance of a setting."""
    return published_engine(
        setting.model,
        H800,
        setting.gpus,
        slowness=unstated.slowness,
        sequences=setting.ranks * round(unstated.sequences),
        memory_share=unstated.memory_share,
    )


def seer_run(setting: SeerSetting, unstated: VerlUnstated) -> TrainingRun:
    """One rollout phase of a setting."""
    return TrainingRun(
        name=_RUN,
        trainer="paper",
        steps=1,
        prompts=setting.prompts,
        group=setting.group,
        cap=setting.cap,
        prompt_tokens=QuantitySpec(value=unstated.prompt),
        lengths=LengthSpec(mean=setting.mean, median=1.0, sigma=unstated.sigma, correlation=unstated.correlation),
    )


@lru_cache(maxsize=4096)
def _rollout(name: str, unstated: VerlUnstated, seed: int) -> Mapping[str, float]:
    """One rollout phase under veRL."""
    setting = SETTINGS[name]
    engine, run = seer_engine(setting, unstated), seer_run(setting, unstated)
    policy, profiles = ObservedVerl(_RUN), PaperProfiles([engine], PaperTimes())
    outcome = simulated([co_located(engine, setting.instances, _RUN)], run, policy, profiles, seed=seed)
    step = outcome.steps[0]
    total_s = step.generated_s - step.opened_s
    ends = _last_ends(outcome)
    return {
        "total": total_s,
        "tail": step.tail_s / total_s,
        "preemptions": float(outcome.preemptions),
        "late start": policy.late_start_share(),
        "idle": sum(step.generated_s - end for end in ends) / (len(ends) * total_s),
        "gap": (step.generated_s - min(ends)) / total_s,
    }


def _last_ends(outcome: Outcome) -> list[float]:
    """When each instance ended its last rollout."""
    ends: dict[str, float] = {}
    for span in outcome.spans:
        if span.pool == "local" and span.state == "generating":
            ends[span.machine] = max(ends.get(span.machine, 0.0), span.end_s)
    return list(ends.values())
