"""Offers the client's calls without asyncio: an event loop in a background thread runs them."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ebbtide.auth.security import ClientSecurity
from ebbtide.client.client import Client, Role
from ebbtide.client.lease import Lease
from ebbtide.types.fleet import Worker
from ebbtide.types.rollout import (
    Episode,
    FinishedRollout,
    RolloutRequest,
    SubmitOutcome,
    TokenChunk,
    Trajectory,
    TrajectoryOutcome,
)
from ebbtide.types.run import AttemptSpan, Run, RunEvent, RunSpec, RunStatus, Sampling
from ebbtide.types.session import KeyUsage
from ebbtide.types.weights import Box, Manifest, PolicyVersion, VersionInfo, WeightsState

if TYPE_CHECKING:
    from ebbtide.client.publisher.publisher import Publisher, Publishing, PublishReport, Tensors
    from ebbtide.client.publisher.rank_exchange import RankExchange
    from ebbtide.weights import NamedTensor

T = TypeVar("T")


class LoopThread:
    """Runs an event loop in its own daemon thread, which dies with the program."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ebbtide-client", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupt also ends the call
            raise

    def run(self, work: Callable[[], T]) -> T:
        """Call a plain function that needs the running loop."""

        async def running() -> T:
            return work()

        return self.call(running())

    def wait(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await, in the loop, what `work` returns there."""

        async def waiting() -> T:
            return await work()

        return self.call(waiting())

    def iterate(self, stream: AsyncGenerator[T, None]) -> Iterator[T]:
        try:
            while (item := self.wait(lambda: anext(stream, None))) is not None:
                yield item
        finally:
            self.wait(stream.aclose)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class SyncClient:
    """`Client` for programs without asyncio; use it in a `with` block. Streams are plain iterators."""

    def __init__(
        self,
        coordinator: str | None = None,
        relay: str | None = None,
        *,
        token: str | None = None,
        tls_ca: str | None = None,
        security: ClientSecurity | None = None,
        patience_s: float = 60.0,
    ) -> None:
        self._loop = LoopThread()
        try:
            self._client = self._loop.run(
                lambda: Client(coordinator, relay, token=token, tls_ca=tls_ca, security=security, patience_s=patience_s)
            )
        except BaseException:
            self._loop.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._loop.call(self._client.close())
        self._loop.close()

    def submit(self, spec: RunSpec | Mapping[str, Any] | str | Path, run_id: str | None = None) -> Run:
        return self._loop.call(self._client.submit(spec, run_id))

    def run(self, run_id: str) -> Run:
        return self._loop.call(self._client.run(run_id))

    def runs(self) -> list[Run]:
        return self._loop.call(self._client.runs())

    def cancel(self, run_id: str) -> Run:
        return self._loop.call(self._client.cancel(run_id))

    def watch(self, run_id: str, cursor: str = "") -> Iterator[RunEvent]:
        return self._loop.iterate(self._client.watch(run_id, cursor))

    def key_usage(self, run_id: str) -> list[KeyUsage]:
        return self._loop.call(self._client.key_usage(run_id))

    def workers(self) -> list[Worker]:
        return self._loop.call(self._client.workers())

    def drain_worker(self, worker_id: str, within_s: float = 30.0) -> int:
        return self._loop.call(self._client.drain_worker(worker_id, within_s))

    def timeline(self, run_id: str, cursor: str = "") -> Iterator[AttemptSpan]:
        return self._loop.iterate(self._client.timeline(run_id, cursor))

    def trajectories(self, run_id: str, cursor: str = "") -> Iterator[Trajectory]:
        return self._loop.iterate(self._client.trajectories(run_id, cursor))

    def stream_tokens(self, run_id: str, rollout_id: str, offset: int = 0) -> Iterator[TokenChunk]:
        return self._loop.iterate(self._client.stream_tokens(run_id, rollout_id, offset))

    def describe_weights(self, run_id: str) -> WeightsState:
        return self._loop.call(self._client.describe_weights(run_id))

    def versions(self, run_id: str, policy: str = "policy") -> Iterator[VersionInfo]:
        return self._loop.iterate(self._client.versions(run_id, policy))

    def fetch_weights(
        self,
        run_id: str,
        policy: str = "policy",
        version: int = 0,
        *,
        boxes: Mapping[str, Box] | None = None,
        publisher: bytes = b"",
    ) -> "tuple[Manifest, dict[str, NamedTensor]]":
        return self._loop.call(self._client.fetch_weights(run_id, policy, version, boxes=boxes, publisher=publisher))

    def publisher(self, run_id: str, exchange: "RankExchange", policy: str = "policy") -> "SyncPublisher":
        return SyncPublisher(self._loop, self._loop.run(lambda: self._client.publisher(run_id, exchange, policy)))

    @contextmanager
    def claim(
        self, run_id: str | None = None, role: Role = "trainer", *, holder: str = "", wait: bool = True
    ) -> Iterator["SyncLease"]:
        lease = self._loop.call(self._client.acquire(run_id, role, holder=holder, wait=wait))
        try:
            yield SyncLease(self._loop, lease)
        finally:
            self._loop.call(lease.release())


class SyncLease:
    """`Lease` for programs without asyncio; made by `SyncClient.claim`."""

    def __init__(self, loop: LoopThread, lease: Lease) -> None:
        self._loop, self._lease = loop, lease

    @property
    def run(self) -> Run:
        return self._lease.run

    @property
    def run_id(self) -> str:
        return self._lease.run_id

    @property
    def lost(self) -> bool:
        return self._lease.lost.is_set()

    def submit_rollouts(
        self, rollouts: Iterable[RolloutRequest], *, wait: bool = True, step: int | None = None, first_step: int = 0
    ) -> list[SubmitOutcome]:
        call = self._lease.submit_rollouts(rollouts, wait=wait, step=step, first_step=first_step)
        return self._loop.call(call)

    def finished(self, cursor: str = "") -> Iterator[FinishedRollout]:
        return self._loop.iterate(self._lease.finished(cursor))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        samples: int,
        step: int,
        version: PolicyVersion,
        sampling: Sampling | None = None,
    ) -> list[list[FinishedRollout]]:
        call = self._lease.generate(prompts, samples=samples, step=step, version=version, sampling=sampling)
        return self._loop.call(call)

    def acknowledge(self, rollout_ids: Iterable[str], drop_reason: str = "") -> None:
        self._loop.call(self._lease.acknowledge(rollout_ids, drop_reason))

    def cancel_rollouts(self, rollout_ids: Iterable[str], reason: str = "") -> None:
        self._loop.call(self._lease.cancel_rollouts(rollout_ids, reason))

    def complete_episodes(self, episodes: Iterable[Episode]) -> None:
        self._loop.call(self._lease.complete_episodes(episodes))

    def trajectories(self, cursor: str = "") -> Iterator[Trajectory]:
        return self._loop.iterate(self._lease.trajectories(cursor))

    def commit(self, outcomes: Iterable[TrajectoryOutcome]) -> None:
        self._loop.call(self._lease.commit(outcomes))

    def publish(self, tensors: "Tensors", *, step: int, parent: int = 0) -> PolicyVersion:
        return self._loop.call(self._lease.publish(tensors, step=step, parent=parent))

    def publishing(self, tensors: "Tensors", *, step: int, parent: int = 0) -> "SyncPublishing":
        return SyncPublishing(self._loop, self._loop.call(self._lease.publishing(tensors, step=step, parent=parent)))

    def publisher(self, exchange: "RankExchange | None" = None) -> "SyncPublisher":
        return SyncPublisher(self._loop, self._loop.run(lambda: self._lease.publisher(exchange)))

    def report(self, events: Sequence[RunEvent]) -> None:
        self._loop.call(self._lease.report(events))

    def finish(self, status: RunStatus = RunStatus.FINISHED, message: str = "") -> Run:
        return self._loop.call(self._lease.finish(status, message))


class SyncPublisher:
    """`Publisher` for programs without asyncio."""

    def __init__(self, loop: LoopThread, publisher: "Publisher") -> None:
        self._loop, self._publisher = loop, publisher

    def publish(self, tensors: "Tensors", *, step: int = 0, parent: int = 0) -> "SyncPublishing":
        return SyncPublishing(self._loop, self._loop.call(self._publisher.publish(tensors, step=step, parent=parent)))

    def close(self, within_s: float = 0.0) -> None:
        self._loop.call(self._publisher.aclose(within_s))


class SyncPublishing:
    """`Publishing` for programs without asyncio: `result` waits for the version."""

    def __init__(self, loop: LoopThread, publishing: "Publishing") -> None:
        self._loop, self._publishing = loop, publishing

    def result(self) -> PolicyVersion:
        return self._loop.wait(lambda: self._publishing)

    @property
    def report(self) -> "PublishReport":
        return self._publishing.report
