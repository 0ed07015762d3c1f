"""Scores responses in processes of their own, decides which steps are scored so, and ends a scoring out of time.

An environment's steps belong to a process, as the next step needs what the last one left. A scoring needs nothing of
that: it makes the episode again by its responses, in any idle process, in the order of arrival. So a slow scoring keeps
others waiting only once all processes are busy, and one that is stuck costs its own episode alone.

What a process waited for a CPU is not its time. Linux counts for each task how long it could have run and did not
(`/proc/PID/task/TID/schedstat`, second number, in nanoseconds). Processes that end take their count along, and where
the host has no such file nothing is known. So the wait may be counted too short, and never too long.

Invariant: at most `number` scorings run, and each has a process to itself meanwhile. A process that ended or was cut is
never used again. One that had scored before and ends during a scoring may be another's doing: that scoring is repeated
in a new process. Each scoring is counted once. All of it dies with the driver, whose replay scores again.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from msgspec import Struct

from ebbtide.driver.environment_host import HostReply, OpenEpisode, StepEpisode
from ebbtide.driver.environments import EnvironmentFailed, EpisodeClock, checked_reply
from ebbtide.driver.host_process import HostEnded, HostProcess, TookTooLong
from ebbtide.errors import InvalidRequest
from ebbtide.telemetry import counter, histogram
from ebbtide.types.run import RunSpec

_PROC: Final = Path("/proc")


class CpuWaits:
    """Watches a process and all that descend from it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = _waits(pid)

    def since_s(self) -> float:
        """Seconds that one task, the one that waited longest, waited since this was made."""
        return max((wait - self._before.get(task, 0) for task, wait in _waits(self._pid).items()), default=0) / 1e9


def _waits(pid: int) -> dict[int, int]:
    """Task -> nanoseconds, of a process and its descendants. Those that end meanwhile are left out."""
    found: dict[int, int] = {}
    pids = [pid]
    while pids:
        for task in _tasks(pids.pop()):
            try:
                found[int(task.name)] = int((task / "schedstat").read_text().split()[1])
                pids += map(int, (task / "children").read_text().split())
            except (OSError, ValueError, IndexError):
                continue
    return found


def _tasks(pid: int) -> list[Path]:
    try:
        return list((_PROC / str(pid) / "task").iterdir())
    except OSError:
        return []


T = TypeVar("T")

#: A scoring that waited for a CPU is asked again after its missing time, but not more often than this.
_LEAST_S: Final = 0.02


class OutOfTime(TookTooLong):
    """A scoring was cut by its own limit, not by its episode's."""

    def __init__(self, own_s: float) -> None:
        super().__init__(f"the reward took more than {own_s:.3g} s")


class RewardClock:
    """Watches one scoring."""

    def __init__(self, limit_s: float, *, pid: int) -> None:
        """`limit_s`: seconds of its own; inf: it has none. `pid`: of the process that scores."""
        self._limit_s = limit_s
        self._waits, self._began = CpuWaits(pid), time.monotonic()

    @property
    def own_s(self) -> float:
        """Seconds since the beginning, without those that the process waited for a CPU."""
        wall_s = time.monotonic() - self._began
        return max(0.0, wall_s - self._waits.since_s())

    async def watch(self, call: "asyncio.Future[T]") -> T:
        """Returns what the call does. Raises `OutOfTime` once it is to be cut, and leaves it running."""
        own_s = 0.0
        while own_s < self._limit_s:
            wait_s = max(_LEAST_S, self._limit_s - own_s)
            await asyncio.wait({call}, timeout=wait_s if wait_s < inf else None)
            if call.done():
                return call.result()
            own_s = self.own_s
        raise OutOfTime(own_s)


_wait_s = histogram("driver_reward_wait_seconds", "how long responses wait for a process that computes their reward")

#: Begins the watch of a scoring in the process with this id.
Watched = Callable[[int], RewardClock]


class Scoring(NamedTuple):
    """What is to be scored: the last response of an episode."""

    opening: OpenEpisode
    before: tuple[str, ...]  # its earlier responses
    response: str


class ScoringProcesses:
    """A run's processes for scorings. They start when they are first needed."""

    def __init__(self, start: Callable[[], Awaitable[HostProcess]], number: int) -> None:
        self._start, self._free = start, asyncio.Semaphore(number)
        self._idle: list[HostProcess] = []

    async def score(self, scoring: Scoring, clock: EpisodeClock, watched: Watched) -> HostReply:
        """Returns the environment's answer to the response.

        Raises what the environment's failures are (`EnvironmentFailed`, `InvalidRequest`), `OutOfTime` by the limit of
        scorings, and `TookTooLong` by the episode's.
        """
        asked = time.monotonic()
        async with self._free:
            _wait_s.observe(time.monotonic() - asked)
            while True:
                process, fresh = (self._idle.pop(), False) if self._idle else (await self._start(), True)
                try:
                    return await self._carried_out(process, scoring, clock, watched)
                except HostEnded as error:
                    if fresh:
                        raise EnvironmentFailed(str(error)) from None

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        await asyncio.gather(*(process.end() for process in idle))

    async def _carried_out(
        self, process: HostProcess, scoring: Scoring, clock: EpisodeClock, watched: Watched
    ) -> HostReply:
        try:
            reply = await _scored(process, scoring, clock, watched)
        except (EnvironmentFailed, InvalidRequest):
            self._give_back(process, scoring)
            raise
        except BaseException:
            await asyncio.shield(process.end())
            raise
        self._give_back(process, scoring)
        return reply

    def _give_back(self, process: HostProcess, scoring: Scoring) -> None:
        process.closed.append(scoring.opening.episode)
        self._idle.append(process)


async def _scored(process: HostProcess, scoring: Scoring, clock: EpisodeClock, watched: Watched) -> HostReply:
    """Replays the episode on no clock, as that is not the response's doing, then scores it."""
    number = scoring.opening.episode
    checked_reply(await process.call(scoring.opening, timeout_s=clock.limit_s))
    for response in scoring.before:
        checked_reply(await process.call(StepEpisode(number, response), timeout_s=clock.limit_s))
    request = StepEpisode(number, scoring.response)
    with clock.measure():
        call = asyncio.ensure_future(process.call(request, timeout_s=clock.left_s))
        try:
            return checked_reply(await watched(process.pid).watch(call))
        finally:
            call.cancel()  # which gives the process up, unless it has answered
            await asyncio.gather(call, return_exceptions=True)


#: Steps in a row that ended their episodes, until the next one is taken for a scoring.
LEARNT: Final = 16
#: Replaying an episode must not take longer than this, or than the scoring itself, whichever is more.
_CHEAP_S: Final = 0.05
_WEIGHT: Final = 0.2


class _Turn(Struct):
    ended: int = 0  # steps in a row
    mean_s: float = 0.0  # of its steps, newer ones more


class FinalTurns:
    """Tells the steps of an environment that score from those that give the next turn, of one run's episodes.

    A step that ends its episode is a scoring: nobody waits for another turn. Which one it will be is known before for
    the last turn that a run allows. Else it is learnt: where all of the last steps at a turn ended their episodes, the
    next one is taken for a scoring. A wrong guess costs time alone, as any process can make an episode again from its
    responses, unless that step outlasts the limit of scorings: then it is cut as one. Lost with the process: it is
    learnt again.
    """

    def __init__(self) -> None:
        self._turns: dict[int, _Turn] = {}

    def scores(self, turn: int, *, last: bool) -> bool:
        """Whether the step at `turn` (from 0) should be scored apart. `last`: the run allows no further one."""
        known = self._turns.get(turn, _Turn())
        if not last and known.ended < LEARNT:
            return False
        replay_s = sum(self._turns.get(one, _Turn()).mean_s for one in range(turn))
        return replay_s <= max(known.mean_s, _CHEAP_S)

    def note(self, turn: int, took_s: float, *, ended: bool) -> None:
        """A step took so long, and ended its episode or did not."""
        known = self._turns.setdefault(turn, _Turn(mean_s=took_s))
        known.mean_s += _WEIGHT * (took_s - known.mean_s)
        known.ended = known.ended + 1 if ended else 0


#: Of a scoring that was cut and got the environment's reward for that, in the episode's numbers.
OUT_OF_TIME: Final = "out_of_time"
_rewards = counter(
    "driver_rewards_total",
    "rewards computed in processes of their own; `outcome`: scored, failed, out_of_time",
    ("outcome",),
)
_reward_s = histogram(
    "driver_reward_seconds", "duration of reward computations in processes of their own, without waits for a CPU"
)


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
