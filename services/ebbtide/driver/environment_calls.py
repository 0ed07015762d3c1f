"""Defines how the driver calls an episode's environment, wherever that runs; runs built-in ones in threads."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol, TypeVar

from ebbtide.driver.environment_threads import EnvironmentThreads
from ebbtide.environments import Environment, EnvironmentSource, Message, Split, StepResult, checked_result
from ebbtide.telemetry import histogram

T = TypeVar("T")

#: Loading an environment's data may take minutes; longer means that it hangs.
LOADING_S: Final = 600.0

_environment_s = histogram("driver_environment_seconds", "Duration of calls of environment code")


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

    async def step(self, clock: EpisodeClock, response: str) -> StepResult: ...

    def close(self) -> None:
        """Gives the environment up."""
        ...


class Environments(Protocol):
    """The environments of a run."""

    async def load(self) -> None:
        """Raises `InvalidRequest` or `RunFailed` if the source cannot be made."""
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

    async def step(self, clock: EpisodeClock, response: str) -> StepResult:
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
