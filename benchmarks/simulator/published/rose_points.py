"""ROSE (arXiv 2605.06534): rollout times beside served requests."""

from collections.abc import Mapping, Sequence

from benchmarks.simulator.published.published_point import Paper, PublishedPoint, UnstatedValue, Use

_REASON = "needs pools of machines that serve users, which simulated fleets do not have yet"
_TIMES = (
    ("Qwen3-8B: ROSE, rollout (s)", 496.3),
    ("Qwen3-8B: ServerlessLLM, rollout (s)", 651.7),
    ("Qwen3-8B: Prism, rollout (s)", 731.7),
    ("Qwen3-32B: ROSE, rollout (s)", 960.1),
    ("Qwen3-32B: ServerlessLLM, rollout (s)", 1161.8),
    ("Qwen3-32B: Prism, rollout (s)", 1301.2),
)


class RosePaper(Paper):
    """All of its points are left out."""

    name = "ROSE"
    unstated: Sequence[UnstatedValue] = ()
    points: Sequence[PublishedPoint] = tuple(
        PublishedPoint(
            key="", where="one checkpoint's co-serving", what=what, value=value, use=Use.LEFT_OUT, reason=_REASON
        )
        for what, value in _TIMES
    )

    def simulated(self, unstated: Mapping[str, float], keys: frozenset[str] | None = None) -> dict[str, float]:
        del unstated, keys
        return {}
