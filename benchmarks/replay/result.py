"""What a replay counts."""

from statistics import fmean

from msgspec import Struct, field

from benchmarks.replay.engine import Rollout


class Result(Struct, kw_only=True):
    """Of one policy. `ends`: when each step ended, in seconds of the trace; `tokens`, `twice`: of ended rollouts, those
    kept and those generated once more; `attempts` and `rollouts` likewise.
    """

    policy: str
    ends: list[float] = field(default_factory=list)
    tokens: int = 0
    twice: float = 0.0
    rollouts: int = 0
    attempts: int = 0
    moves: int = 0
    losses: int = 0
    unfinished_tokens: float = 0.0

    def ended(self, rollout: Rollout) -> None:
        self.tokens += rollout.length
        self.twice += rollout.twice
        self.rollouts += 1
        self.attempts += rollout.attempts

    @property
    def share_twice(self) -> float:
        """Of all tokens generated, the share that was generated again."""
        return self.twice / (self.tokens + self.twice) if self.tokens else 0.0

    @property
    def attempts_per_rollout(self) -> float:
        return self.attempts / self.rollouts if self.rollouts else 0.0


def mean_step_s(ends: list[float], steps: int) -> float:
    """Seconds per step over the first `steps`."""
    return ends[steps - 1] / steps


def step_times(ends: list[float]) -> list[float]:
    return [end - start for start, end in zip([0.0, *ends], ends, strict=False)]


def mean(values: list[float]) -> float:
    return fmean(values) if values else 0.0
