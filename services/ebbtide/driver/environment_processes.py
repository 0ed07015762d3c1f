"""Runs environments that are not Ebbtide's own in processes, as they may crash, hang, hoard memory or be hostile.

Invariant: an episode belongs to one place, and a place has at most one process, which serves one call at a time. If the
process is gone, its episodes are made again in the next one, by replaying their responses. A call that ends a process
which had other episodes is repeated in a process of its own, so an episode fails only by its own doing. All of it dies
with the driver, whose replay makes it again.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from ebbtide.driver.environment_host import HostPlan, HostReply, LoadSource, OpenEpisode, Request, StepEpisode
from ebbtide.driver.environments import LOADING_S, EnvironmentFailed, EpisodeClock, checked_reply
from ebbtide.driver.host_process import HostEnded, HostProcess, IsolationRefused, TookTooLong
from ebbtide.driver.scoring import RewardScorer, Scoring, ScoringProcesses
from ebbtide.driver.settings import DriverSettings
from ebbtide.environments import Message, Split, StepResult, checked_result
from ebbtide.errors import InvalidRequest
from ebbtide.run_client import RunFailed
from ebbtide.types.run import RunSpec


class _Place:
    """Room for one process."""

    def __init__(self, processes: "EnvironmentProcesses") -> None:
        self._processes = processes
        self._lock = asyncio.Lock()
        self._process: HostProcess | None = None
        self.users = 0  # calls that wait or run
        self.live: set[int] = set()  # episodes that the present process has

    @property
    def started(self) -> bool:
        return self._process is not None

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        self.users += 1
        try:
            async with self._lock:
                yield
        finally:
            self.users -= 1

    async def running(self) -> HostProcess:
        if self._process is None:
            self._process = await self._processes.start()
        return self._process

    def release(self, episode: int) -> None:
        """Gives an episode's environment up."""
        if episode in self.live and self._process is not None:
            self._process.closed.append(episode)
        self.live.discard(episode)

    async def give_up(self) -> None:
        """Ends the process and forgets what it held."""
        process, self._process = self._process, None
        self.live.clear()
        if process is not None:
            await asyncio.shield(process.end())


#: Of processes that score, beside those whose steps give the next turns: these go first where both want a CPU.
_SCORING_NICE: Final = 5


class EnvironmentProcesses:
    """Runs a run's environments in at most `environment_threads` processes, and scores in up to `scoring_processes`."""

    def __init__(self, spec: RunSpec, settings: DriverSettings, plan: HostPlan) -> None:
        """`plan`: how processes are made, `host_plan(settings)` in a driver."""
        self._spec = spec
        self._settings = settings
        self._plan = plan
        self._places = [_Place(self) for _ in range(settings.environment_threads)]
        self._numbers = itertools.count()
        beside = msgspec.structs.replace(plan, nice=_SCORING_NICE)
        scoring = ScoringProcesses(lambda: self.start(beside), settings.scoring_processes)
        self._scorer = RewardScorer(spec, scoring) if settings.scoring_processes else None

    async def load(self) -> None:
        """Starts the first process. Raises `InvalidRequest` or `RunFailed` if the source cannot be made."""
        async with self._places[0].turn():
            await self._places[0].running()

    def episode(self, split: Split, index: int) -> "ProcessEpisode":
        place = min(self._places, key=lambda one: (one.users, not one.started, len(one.live)))
        return ProcessEpisode(place, next(self._numbers), split, index, self._scorer)

    def scorings(self) -> dict[str, float]:
        return self._scorer.counted() if self._scorer is not None else {}

    async def close(self) -> None:
        await asyncio.gather(*(place.give_up() for place in self._places))
        if self._scorer is not None:
            await self._scorer.close()

    async def start(self, plan: HostPlan | None = None) -> HostProcess:
        """Starts a process and loads the source in it. `plan`: another than that of steps."""
        environment = self._spec.environment
        try:
            process = await HostProcess.start(self._settings, plan or self._plan)
        except IsolationRefused as error:
            raise InvalidRequest(
                f"code of {environment.name!r} has to run isolated, and the driver's host does not allow it ({error}); "
                "let it, or set environments.trust = true (EBBTIDE_DRIVER_ENVIRONMENTS_TRUST) if all who submit runs "
                "may have the driver's files and tokens",
                field="environment.name",
            ) from None
        except (HostEnded, TookTooLong, OSError) as error:
            raise RunFailed(f"no process for environment {environment.name!r} could be started: {error}") from error
        try:
            await self._load(process)
        except BaseException:
            await process.end()
            raise
        return process

    async def _load(self, process: HostProcess) -> None:
        environment = self._spec.environment
        request = LoadSource(environment.name, msgspec.json.encode(environment.params), self._spec.seed)
        try:
            reply = await process.call(request, timeout_s=LOADING_S)
        except HostEnded as error:
            raise RunFailed(f"environment {environment.name!r} cannot be made: {error}") from None
        if reply.error and reply.field is not None:
            raise InvalidRequest(reply.error, field=reply.field)
        if reply.error:
            raise RunFailed(f"environment {environment.name!r} cannot be made: {reply.error}")
        if self._scorer is not None:
            self._scorer.reward_out_of_time = reply.reward


class ProcessEpisode:
    """One episode's environment, in the process of its place."""

    def __init__(
        self, place: _Place, number: int, split: Split, index: int, scorer: RewardScorer | None = None
    ) -> None:
        """`scorer`: of responses that are scored apart; None: the place scores."""
        self._place = place
        self._number = number
        self._opening = OpenEpisode(number, split, index)
        self._responses: list[str] = []
        self._scorer = scorer

    async def reset(self, clock: EpisodeClock) -> list[Message]:
        reply = await self._call(clock, self._opening)
        return [Message(role, content) for role, content in reply.messages]

    async def step(self, clock: EpisodeClock, response: str, *, last: bool = False) -> StepResult:
        turn, before_s = len(self._responses), clock.left_s
        if self._scorer is not None and self._scorer.takes(turn, last=last):
            scoring = Scoring(self._opening, tuple(self._responses), response)
            reply = await self._scorer.score(scoring, clock)
            self._place.release(self._number)  # a further turn begins with a replay: the place lacks this one
        else:
            reply = await self._call(clock, StepEpisode(self._number, response))
        if self._scorer is not None:
            self._scorer.note(turn, before_s - clock.left_s, ended=reply.done)
        self._responses.append(response)
        messages = tuple(Message(role, content) for role, content in reply.messages)
        return checked_result(StepResult(messages, reply.reward, reply.done, reply.info))

    def close(self) -> None:
        self._place.release(self._number)

    async def _call(self, clock: EpisodeClock, request: Request) -> HostReply:
        if clock.left_s <= 0:
            raise TookTooLong
        async with self._place.turn():
            while True:
                process = await self._place.running()
                alone = process.hosted <= {self._number}
                try:
                    return await self._carry_out(process, clock, request)
                except HostEnded as error:
                    await self._place.give_up()
                    if alone:
                        raise EnvironmentFailed(str(error)) from None
                except (TookTooLong, asyncio.CancelledError):
                    await self._place.give_up()
                    raise

    async def _carry_out(self, process: HostProcess, clock: EpisodeClock, request: Request) -> HostReply:
        process.hosted.add(self._number)
        if isinstance(request, StepEpisode) and self._number not in self._place.live:
            await self._answer(process, self._opening, clock.limit_s)  # on no clock: the loss may be another's doing
            for response in self._responses:
                await self._answer(process, StepEpisode(self._number, response), clock.limit_s)
        with clock.measure():
            return await self._answer(process, request, clock.left_s)

    async def _answer(self, process: HostProcess, request: Request, timeout_s: float) -> HostReply:
        reply = checked_reply(await process.call(request, timeout_s=timeout_s))
        self._place.live.add(self._number)
        return reply
