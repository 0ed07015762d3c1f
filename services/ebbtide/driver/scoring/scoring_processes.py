"""Scores responses in processes of their own. Any idle one takes the next scoring, in the order of arrival.

An environment's steps belong to a process, as the next step needs what the last one left. A scoring needs nothing of
that: it makes the episode again by its responses, wherever there is room. So a slow scoring keeps others waiting only
once all processes are busy, and one that is stuck costs its own episode alone.

Invariant: at most `number` scorings run, and each has a process to itself meanwhile. A process that ended or was cut is
never used again. One that had scored before and ends during a scoring may be another's doing: that scoring is repeated
in a new process. All of it dies with the driver, whose replay scores again.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from ebbtide.driver.environment_host import HostReply, OpenEpisode, StepEpisode
from ebbtide.driver.environments import EnvironmentFailed, EpisodeClock, checked_reply
from ebbtide.driver.host_process import HostEnded, HostProcess
from ebbtide.driver.scoring.reward_clock import RewardClock
from ebbtide.errors import InvalidRequest
from ebbtide.telemetry import histogram

_wait_s = histogram("driver_reward_wait_seconds", "Time that responses wait for a process that scores them")

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
