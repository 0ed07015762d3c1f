"""Decides which steps of a run's environment are scored apart, and counts what became of them.

Invariant: each scoring is counted once. Lost with the process: counts that were not reported, and what was learnt of
turns.
"""

from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import Final

from ebbtide.driver.environment_host import HostReply
from ebbtide.driver.environments import EpisodeClock
from ebbtide.driver.scoring.reward_clock import OutOfTime, RewardClock
from ebbtide.driver.scoring.scoring_processes import Scoring, ScoringProcesses
from ebbtide.scheduling.long_tail.final_turns import FinalTurns
from ebbtide.telemetry import counter, histogram
from ebbtide.types.run import RunSpec

#: Of a scoring that was cut and got the environment's reward for that, in the episode's numbers.
OUT_OF_TIME: Final = "out_of_time"
_rewards = counter("driver_rewards_total", "Responses scored apart, by what became of them", ("outcome",))
_reward_s = histogram("driver_reward_seconds", "Duration of scorings, without their processes' waits for a CPU")


class RewardScorer:
    """Scores the responses of one run."""

    def __init__(self, spec: RunSpec, processes: ScoringProcesses) -> None:
        self._limit_s = spec.tail.reward_timeout_s or inf  # without one, the episode's clock ends a scoring
        self._turns, self._processes = FinalTurns(), processes
        self._counts: Counter[str] = Counter()
        self.reward_out_of_time: float | None = None  # the environment's; None: such an episode fails

    def takes(self, turn: int, *, last: bool) -> bool:
        """Whether the response of `turn` (from 0) is scored here. `last`: the run allows no further turn."""
        return self._turns.scores(turn, last=last)

    def note(self, turn: int, took_s: float, *, ended: bool) -> None:
        """A step took so long, wherever it ran, and ended its episode or did not."""
        self._turns.note(turn, took_s, ended=ended)

    async def score(self, scoring: Scoring, clock: EpisodeClock) -> HostReply:
        """Scores a response. Raises as `ScoringProcesses.score` does; `OutOfTime` only if the environment has no reward
        for that."""
        watches: list[RewardClock] = []

        def watched(pid: int) -> RewardClock:
            watches.append(RewardClock(self._limit_s, pid=pid))
            return watches[-1]

        try:
            reply = await self._processes.score(scoring, clock, watched)
        except OutOfTime:
            self._ended(watches, OUT_OF_TIME)
            if self.reward_out_of_time is None:
                raise
            return HostReply(reward=self.reward_out_of_time, done=True, info={OUT_OF_TIME: 1.0})
        except Exception:
            self._ended(watches, "failed")
            raise
        self._ended(watches, "scored")
        return reply

    def counted(self) -> dict[str, float]:
        """What happened since the last call: `scored`, `failed`, `out_of_time`."""
        counts, self._counts = self._counts, Counter()
        return {name: float(count) for name, count in counts.items()}

    async def close(self) -> None:
        await self._processes.close()

    def _ended(self, watches: Sequence[RewardClock], outcome: str) -> None:
        if watches:
            _reward_s.observe(watches[-1].own_s)
        self._counts[outcome] += 1
        _rewards.labels(outcome).inc()
