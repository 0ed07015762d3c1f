"""Defines how the driver calls an episode's environment, wherever that runs; runs built-in ones in threads."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol, TypeVar

from ebbtide.driver.environment_threads import EnvironmentThreads
from ebbtide.driver.host_process import HostEnded
from ebbtide.driver.isolation.host_messages import HostReply
from ebbtide.environments import Environment, EnvironmentSource, Message, Split, StepResult, checked_result
from ebbtide.errors import InvalidRequest
from ebbtide.telemetry import histogram

T = TypeVar("T")

#: Loading an environment's data may take minutes; longer means that it hangs.
LOADING_S: Final = 600.0

_environment_s = histogram("driver_environment_seconds", "Duration of calls of environment code")


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
