"""What a replay counts."""

from collections.abc import Sequence

from msgspec import Struct, field

from benchmarks.replay.engine import Rollout


class Result(Struct, kw_only=True):
    """Of one policy. `ends`: when each step ended, in seconds of the trace; `tokens`: of ended rollouts; `twice`: those
    generated once more, of ended and unfinished rollouts; `unfinished`: tokens of those that the trace's end cut off.
    """

    policy: str
    ends: list[float] = field(default_factory=list)
    tokens: int = 0
    twice: float = 0.0
    rollouts: int = 0
    attempts: int = 0
    moves: int = 0
    losses: int = 0
    unfinished: float = 0.0

    def ended(self, rollout: Rollout) -> None:
        self.tokens += rollout.length
        self.twice += rollout.twice
        self.rollouts += 1
        self.attempts += rollout.attempts

    @property
    def share_twice(self) -> float:
        """Of all tokens generated, the share that was generated again."""
        generated = self.tokens + self.unfinished + self.twice
        return self.twice / generated if generated else 0.0

    @property
    def attempts_per_rollout(self) -> float:
        return self.attempts / self.rollouts if self.rollouts else 0.0


def speed_ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """By how much `one` is faster than `other`, over as many steps as both ended: the same steps, so the same tokens.

    Not tokens by the trace's end, in which a step's cheap beginning would count for more than its expensive tail.
    """
    steps = min(len(one), len(other))
    return other[steps - 1] / one[steps - 1] if steps else 0.0
