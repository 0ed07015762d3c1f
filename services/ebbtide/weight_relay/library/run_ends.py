"""Follows which runs end, and drops everything of an ended run.

Invariant: a run's versions are dropped only when its coordinator, or an upstream that heard the coordinator, has said
that it ended; or when a coordinator does not know it in the same store incarnation in which it lived before. A merely
unknown run stays, as far as the budget allows. What the disk does not delete is tried again. Nothing here is durable: a
relay that starts asks about all runs that it finds.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from ebbtide import telemetry
from ebbtide.errors import EbbtideError, LeaseSuperseded
from ebbtide.rpc.backoff import pauses
from ebbtide.rpc.channel import Channel, open_channel
from ebbtide.rpc.leader_channel import LeaderChannel
from ebbtide.rpc.run_endings import MAX_HELD, EndedRun, RunEndings, RunsEnded, check_held
from ebbtide.rpc.status_table import translated
from ebbtide.types.run import RunStatus
from ebbtide.v1.runs_pb2_grpc import RunsStub
from ebbtide.v1.types_pb2 import WatchEndedRequest
from ebbtide.v1.weights_pb2_grpc import WeightsStub
from ebbtide.weight_relay.library.garbage_collector import GarbageCollector
from ebbtide.weight_relay.settings import RelaySettings
from ebbtide.wire import from_proto

log = telemetry.get_logger(__name__)

#: Longer than any caller goes on publishing or reading an ended run.
REMEMBERED_S: Final = 3600.0
_MOST: Final = 100_000
#: How often the follower looks for held runs that it has not asked about.
_LOOK_S: Final = 0.5
#: Delay until blobs that came while a run was dropped are dropped too, and until a failed drop is tried again.
_TRAILING_S: Final = 0.3
_AGAIN_S: Final = 5.0


class EndedRuns:
    """Remembers the ended runs that this relay has heard of.

    Invariant: a run is here only if its coordinator, or an upstream that heard the coordinator, has said that it ended.
    It is forgotten after `REMEMBERED_S`, or when it lives again; the relay takes nothing of it meanwhile. The record
    dies with the process: the next one asks about the runs that it finds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._runs: OrderedDict[str, tuple[EndedRun, float]] = OrderedDict()
        self.endings = RunEndings()

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._runs

    def add(self, run: EndedRun) -> bool:
        """Remember an ended run and tell the listeners; False if it was known."""
        now = self._clock()
        while self._runs and (len(self._runs) >= _MOST or next(iter(self._runs.values()))[1] < now - REMEMBERED_S):
            self._runs.popitem(last=False)
        if run.run_id in self._runs:
            return False
        self._runs[run.run_id] = run, now
        self.endings.tell(run)
        return True

    def lives(self, run_id: str) -> None:
        """Forget that the run has ended: another one lives under its id."""
        self._runs.pop(run_id, None)

    def known(self, run_ids: tuple[str, ...]) -> tuple[EndedRun, ...]:
        return tuple(self._runs[run_id][0] for run_id in run_ids if run_id in self._runs)

    def refuse(self, run_id: str) -> None:
        """Raises `LeaseSuperseded` for a run that has ended."""
        if run_id in self._runs:
            status = self._runs[run_id][0].status.name.lower()
            raise LeaseSuperseded(f"run {run_id} has ended ({status}); step down")


class RunEndSource:
    """The coordinator, or the upstream relay, which is asked about runs."""

    def __init__(self, settings: RelaySettings) -> None:
        own = bool(settings.coordinator)
        self.name, self.target = ("coordinator", settings.coordinator) if own else ("upstream relay", settings.upstream)
        self._channel: LeaderChannel | Channel
        self._stub: Any
        if own:
            self._channel = heads = LeaderChannel(settings.coordinator, settings.coordinator_security)
            self._stub, self._translated = RunsStub(heads), partial(heads.translated, self.name)
        else:
            self._channel = open_channel(settings.upstream, settings.upstream_security)
            self._stub, self._translated = WeightsStub(self._channel), partial(translated, self.name, self.target)

    async def ask(self, held: tuple[str, ...]) -> AsyncIterator[RunsEnded]:
        call = self._stub.WatchEnded(WatchEndedRequest(held=held))
        try:
            with self._translated():
                async for message in call:
                    yield from_proto(message, RunsEnded)
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close()


def source_of(settings: RelaySettings) -> RunEndSource | None:
    """The source that knows which runs have ended; None without a coordinator or an upstream relay."""
    if settings.coordinator or (settings.upstream and not settings.follows_copy):
        return RunEndSource(settings)
    return None


class RunEndFollower:
    """`run` follows the ends; `answer` reports them to relays that follow this one."""

    def __init__(
        self,
        collector: GarbageCollector,
        ended: EndedRuns,
        forget: Callable[[str], Awaitable[None]],
        source: RunEndSource | None,
        *,
        keep_ended_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`forget`: has the relay bring nothing more of an ended run, and send no reader for it. `keep_ended_s`: that
        versions of a finished run stay."""
        self._collector, self._ended, self._forget_readers, self._source = collector, ended, forget, source
        self._keep_s, self._clock = keep_ended_s, clock
        self._seen: dict[str, str] = {}  # live runs, and the store incarnation that they were last seen in
        self._asked: set[str] = set()  # since the last connection
        self._others: set[str] = set()  # runs that the relays following this one hold
        self._due: dict[str, float] = {}  # ended runs, and when to drop them
        self._more = asyncio.Event()

    async def answer(self, held: tuple[str, ...]) -> AsyncIterator[RunsEnded]:
        """Yield the ended ones of the runs that a relay holds, then each run that ends."""
        check_held(held)
        with self._ended.endings.listening() as endings:
            self._others |= set(held[: MAX_HELD - len(self._others)])
            yield RunsEnded(ended=self._ended.known(held))
            while True:
                yield RunsEnded(ended=(await endings.get(),))

    async def run(self) -> None:
        """Follow the source for ever; return at once without one."""
        if self._source is None:
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen(self._source))
                tasks.create_task(self._let_go())
        finally:
            await self._source.close()

    async def _listen(self, source: RunEndSource) -> None:
        waits = pauses()
        while True:
            began = self._clock()
            try:
                await self._ask(source)
                continue  # about more runs
            except EbbtideError as error:
                log.info("cannot hear which runs end", target=source.target, reason=str(error))
            if self._clock() - began > _AGAIN_S:
                waits = pauses()
            await asyncio.sleep(next(waits))

    async def _ask(self, source: RunEndSource) -> None:
        """Ask about all held runs, and listen until there are more."""
        held = sorted(self._collector.held() | self._others - self._due.keys())[:MAX_HELD]
        self._asked = set(held)
        listening = asyncio.create_task(self._hear(source.ask(tuple(held)), frozenset(held)))
        looking = asyncio.create_task(self._look())
        try:
            await asyncio.wait({listening, looking}, return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                listening.result()
        finally:
            for task in (listening, looking):
                task.cancel()
            await asyncio.gather(listening, looking, return_exceptions=True)

    async def _hear(self, messages: AsyncIterator[RunsEnded], held: frozenset[str]) -> None:
        async for message in messages:
            self._take(message, held)

    def _take(self, message: RunsEnded, held: frozenset[str]) -> None:
        for run_id in message.live:
            self._ended.lives(run_id)
            self._due.pop(run_id, None)
        ended = list(message.ended)
        if incarnation := message.store_life:
            named = {run.run_id for run in ended} | set(message.live)
            ended += [
                EndedRun(run_id, RunStatus.CANCELLED)
                for run_id in held - named
                if self._seen.get(run_id) == incarnation  # its record has expired
            ]
            self._seen = {run_id: seen for run_id, seen in self._seen.items() if run_id in held}
            self._seen |= dict.fromkeys(message.live, incarnation)
        for run in ended:
            finished = run.status is RunStatus.FINISHED  # nothing of a cancelled run is wanted
            if self._ended.add(run) or run.run_id in self._collector.held():
                self._due.setdefault(run.run_id, self._clock() + (self._keep_s if finished else 0.0))
            self._others.discard(run.run_id)
        self._more.set()

    async def _look(self) -> None:
        """Return when a run is held that was not asked about."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if (self._collector.held() | self._others) - self._asked - self._seen.keys() - self._due.keys():
                return

    async def _let_go(self) -> None:
        while True:
            now = self._clock()
            due = [run_id for run_id, when in self._due.items() if when <= now]
            for run_id in due:
                await self._forget(run_id)
            if due:
                await asyncio.sleep(_TRAILING_S)
                with suppress(EbbtideError, OSError):
                    await self._collector.drop_garbage()
                continue
            self._more.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(self._due.values(), default=now + _AGAIN_S) - now)):
                    await self._more.wait()

    async def _forget(self, run_id: str) -> None:
        try:
            await self._forget_readers(run_id)
            await self._collector.forget_run(run_id)
        except (EbbtideError, OSError) as error:
            log.warning("an ended run is still here", run_id=run_id, error=str(error))
            self._due[run_id] = self._clock() + _AGAIN_S
        else:
            self._due.pop(run_id, None)
            log.info("ended run let go", run_id=run_id)
