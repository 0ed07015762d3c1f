"""Defines how the driver calls an episode's environment, wherever that runs, and runs built-in ones in threads."""

import asyncio
import concurrent.futures
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeVar

from ebbtide.driver.environment_host import HostReply
from ebbtide.driver.host_process import HostEnded, TookTooLong
from ebbtide.environments import Environment, EnvironmentSource, Message, Split, StepResult, checked_result
from ebbtide.errors import InvalidRequest
from ebbtide.run_client import RunFailed
from ebbtide.telemetry import histogram

# Runs environment code in threads of its own: an exception or an endless call ends one call, not the driver.
#
# Invariant: at most `threads` calls run whose callers still wait; `_serving` threads wait for calls or run such ones.
# A call that exceeds its time is abandoned: its daemon thread cannot be killed, counts as `stuck` until it returns,
# and is replaced. All of it dies with the process; the driver's replay makes it again.

T = TypeVar("T")

#: More stuck calls than this mean that the whole environment hangs, not single episodes.
MAX_STUCK: Final = 256


class EnvironmentHangs(RunFailed):
    """Too many calls into the environment never returned, so the run cannot go on."""


class _Call:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.abandoned = False

    def run(self) -> None:
        try:
            value = self.function()
        except BaseException as error:  # noqa: BLE001 - the caller gets it through the future
            # SystemExit and the like would end the awaiting driver; StopIteration cannot cross a future.
            fit = isinstance(error, Exception) and not isinstance(error, StopIteration)
            self.future.set_exception(error if fit else RuntimeError(f"environment code raised {error!r}"))
        else:
            self.future.set_result(value)


class EnvironmentThreads:
    """Runs calls in at most `threads` threads at a time, each for a limited time."""

    def __init__(self, threads: int) -> None:
        self._limit = threads
        self._places = asyncio.Semaphore(threads)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._serving = 0
        self.stuck = 0

    async def call(self, function: Callable[[], T], *, timeout_s: float) -> T:
        """Returns or raises what `function` does. Raises `TookTooLong` after `timeout_s` seconds, and
        `EnvironmentHangs` if too many calls are stuck."""
        async with self._places:
            if self.stuck >= MAX_STUCK:
                raise EnvironmentHangs(f"{self.stuck} calls into the environment never returned: repair it")
            if self._serving < self._limit:
                threading.Thread(target=_serve, args=(self._calls,), name="environment", daemon=True).start()
                self._serving += 1
            call = _Call(function)
            result: asyncio.Future[T] = asyncio.wrap_future(call.future)
            self._calls.put(call)
            try:
                await asyncio.wait({result}, timeout=max(timeout_s, 0.0))
                if result.done():
                    return result.result()
                raise TookTooLong
            finally:
                if not result.done():
                    self._abandon(call, result)

    def close(self) -> None:
        """Ends the threads that wait for calls."""
        for _ in range(self._serving):
            self._calls.put(None)
        self._serving = 0

    def _abandon(self, call: _Call, result: "asyncio.Future[Any]") -> None:
        call.abandoned = True
        self._serving -= 1
        self.stuck += 1
        result.add_done_callback(self._returned)

    def _returned(self, result: "asyncio.Future[Any]") -> None:
        self.stuck -= 1
        if not result.cancelled():
            result.exception()  # marks it as retrieved: its caller has left


def _serve(calls: "queue.SimpleQueue[_Call | None]") -> None:
    while (call := calls.get()) is not None:
        call.run()
        if call.abandoned:
            return


#: Loading an environment's data may take minutes; longer means that it hangs.
LOADING_S: Final = 600.0

_environment_s = histogram("driver_environment_seconds", "duration of calls of environment code")


class EnvironmentFailed(Exception):
    """The environment raised, or ended its process; the text names both."""


def checked_reply(reply: HostReply) -> HostReply:
    """Returns the answer of a process of environment code. Raises what went wrong: `HostEnded`, `InvalidRequest` or
    `EnvironmentFailed`."""
    if reply.exhausted:
        raise HostEnded(f"{reply.error}: the environment needs more than environments.memory_mib allows")
    if reply.error and reply.field is not None:
        raise InvalidRequest(reply.error, field=reply.field)
    if reply.error:
        raise EnvironmentFailed(reply.error)
    return reply


class EpisodeClock:
    """Measures the time left to an episode's environment code; waiting for tokens, threads or processes is free."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.left_s = limit_s

    @contextmanager
    def measure(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - began
            self.left_s -= took
            _environment_s.observe(took)


class EpisodeEnvironment(Protocol):
    """The environment of one episode. Calls raise what the environment raises, and `TookTooLong`."""

    async def reset(self, clock: EpisodeClock) -> list[Message]: ...

    async def step(self, clock: EpisodeClock, response: str, *, last: bool = False) -> StepResult:
        """`last`: the run allows no further turn."""
        ...

    def close(self) -> None:
        """Gives the environment up."""
        ...


class Environments(Protocol):
    """The environments of a run."""

    async def load(self) -> None:
        """Raises `InvalidRequest` or `RunFailed` if the source cannot be made."""
        ...

    def scorings(self) -> dict[str, float]:
        """What became of the responses that were scored apart, by outcome, since the last call."""
        ...

    def episode(self, split: Split, index: int) -> EpisodeEnvironment: ...

    async def close(self) -> None: ...


class ThreadedEnvironments:
    """Runs environments in threads of this process."""

    def __init__(self, make_source: Callable[[], EnvironmentSource], threads: int) -> None:
        self._make_source = make_source
        self.threads = EnvironmentThreads(threads)
        self.source: EnvironmentSource | None = None

    async def load(self) -> None:
        self.source = await self.threads.call(self._make_source, timeout_s=LOADING_S)

    def scorings(self) -> dict[str, float]:
        return {}  # all calls share the threads: any free one takes the next

    def episode(self, split: Split, index: int) -> "ThreadedEpisode":
        assert self.source is not None  # noqa: S101 - loaded first
        return ThreadedEpisode(self.threads, self.source, split, index)

    async def close(self) -> None:
        self.threads.close()


class ThreadedEpisode:
    def __init__(self, threads: EnvironmentThreads, source: EnvironmentSource, split: Split, index: int) -> None:
        self._threads = threads
        self._source = source
        self._split: Split = split
        self._index = index
        self._environment: Environment | None = None

    async def reset(self, clock: EpisodeClock) -> list[Message]:
        def open_environment() -> tuple[Environment, list[Message]]:
            environment = self._source.make(self._split, self._index)
            return environment, environment.reset()

        self._environment, opening = await self._call(clock, open_environment)
        return opening

    async def step(
        self,
        clock: EpisodeClock,
        response: str,
        *,
        last: bool = False,  # noqa: ARG002 - any free thread takes the call
    ) -> StepResult:
        assert self._environment is not None  # noqa: S101 - reset first
        environment = self._environment
        return await self._call(clock, lambda: checked_result(environment.step(response)))

    def close(self) -> None:
        self._environment = None

    async def _call(self, clock: EpisodeClock, function: Callable[[], T]) -> T:
        def measured() -> T:
            with clock.measure():
                return function()

        return await self._threads.call(measured, timeout_s=clock.left_s)
