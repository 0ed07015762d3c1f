"""ROSE (arXiv 2605.06534): rollout times beside served requests."""

from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.simulator.published.published_point import Paper, PublishedPoint, UnstatedValue, Use

_OWN: Final = "needs its tasks' turns and its trace's load, which are not published: it could only be fitted"
_RIVAL: Final = "needs this rival's sharing of a device's memory, which is not modelled"
_ORDER: Final = (
    "needs the load of each served device and H800's costs of two models on one device, which are not published: "
    "without them the order hangs on what is chosen"
)
_TIMES: Final = (
    ("Qwen3-8B: ROSE, rollout (s)", 496.3, _OWN),
    ("Qwen3-8B: ServerlessLLM, rollout (s)", 651.7, _RIVAL),
    ("Qwen3-8B: Prism, rollout (s)", 731.7, _RIVAL),
    ("Qwen3-32B: ROSE, rollout (s)", 960.1, _OWN),
    ("Qwen3-32B: ServerlessLLM, rollout (s)", 1161.8, _RIVAL),
    ("Qwen3-32B: Prism, rollout (s)", 1301.2, _RIVAL),
    ("Qwen3-8B: P99 TTFT with ROSE over that without rollouts", 1.07, _ORDER),
    ("Qwen3-32B: P99 TTFT with ROSE over that without rollouts", 1.17, _ORDER),
)


class RosePaper(Paper):
    """All of its points are left out."""

    name = "ROSE"
    unstated: Sequence[UnstatedValue] = ()
    points: Sequence[PublishedPoint] = tuple(
        PublishedPoint(
            key="", where="one checkpoint's co-serving", what=what, value=value, use=Use.LEFT_OUT, reason=reason
        )
        for what, value, reason in _TIMES
    )

    def simulated(self, unstated: Mapping[str, float], keys: frozenset[str] | None = None) -> dict[str, float]:
        del unstated, keys
        return {}
