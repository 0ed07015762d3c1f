"""Announces a borrowed engine to the guard of its host before it boots, and lets it boot only while the device is lent.

On a GPU a boot needs memory that its owner may have. So the worker tells the guard beforehand what the engine will need
(`Hello`), and that nothing of it is there yet (a report of weights that are away). A trainer's guard passes the bytes
on, so that the trainer moves out before it lends; any guard answers with a grant that wishes the weights awake once the
device is lent and has room. That is the permission. During the boot reports say that the weights are on their way, so
that a take-back waits for them, as it does for an engine that wakes.

Invariant: nothing is allocated on the device before a guard permitted it. A permission is used at once, or not at all.
The stream stays open until the booted engine has one of its own (`GuardLink`), so that the guard knows of the engine
all the time. Lost with the process: the next one announces itself again.
"""

import asyncio
import os
import time
from contextlib import suppress
from typing import Any, Final

from ebbtide import telemetry
from ebbtide.errors import EbbtideError, Superseded, Unavailable
from ebbtide.rollout_worker.engine.vllm.borrowed_engine import BorrowedEngine
from ebbtide.rpc.backoff import pauses
from ebbtide.rpc.channel import write
from ebbtide.rpc.status_table import translated
from ebbtide.runtime import race
from ebbtide.types.grants import GRANTS_VERSION, BorrowerReport, Grant, Hello, Residency
from ebbtide.v1 import grants_pb2
from ebbtide.v1.grants_pb2_grpc import GrantsStub
from ebbtide.wire import from_proto, to_proto

log = telemetry.get_logger(__name__)

#: Interval of reports: of changes, and else as signs of life.
_REPORT_S: Final = 0.1
_NO_NEWS_S: Final = 0.4
#: Time for the stream of the booted engine to take the announcement's place.
_SUCCESSION_S: Final = 2.0
#: What a boot asks of a served engine's idle time, stated as the time of a wake-up. It reads weights for most of its
#: time, so it needs a quiet moment to begin in, and not one as long as itself, which might never come.
_QUIET_S: Final = 1.0


class BootLoan:
    """The announcement of one engine that is not booted yet, and the permission to boot it."""

    def __init__(self, stub: GrantsStub, target: str, engine: BorrowedEngine, *, worker_id: str) -> None:
        """`engine` knows what it will need (`BorrowedEngine.learn`). `target`: of the guard, for people."""
        self._stub, self._target, self._engine, self._worker_id = stub, target, engine, worker_id
        self._permitted, self._news = asyncio.Event(), asyncio.Event()
        self._sequence = 0  # of the newest grant
        self._wished = Residency.AWAY  # by the newest grant
        self._superseded = asyncio.Event()
        self._reason = ""  # why there is no guard

    async def permission(self) -> None:
        """Wait until the device is lent and has room. From then on reports say that the engine boots."""
        needed = self._engine.weights_bytes + self._engine.kv_bytes
        log.info("waits for the device before it boots", needed=needed, device=self._engine.device)
        began = time.monotonic()
        await self._permitted.wait()
        log.info("boots: the device is lent", waited_s=round(time.monotonic() - began, 3))

    async def succeeded(self) -> None:
        """Wait until the booted engine's stream has taken this one's place, or for some seconds: there may be no guard,
        or its link may not come about."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_SUCCESSION_S):
                await self._superseded.wait()

    async def run(self) -> None:
        """Keep a stream to the guard open, until another stream takes its place once the boot is permitted: that of the
        booted engine. Before that it is another process with this worker's id, and the streams take turns."""
        self._engine.page.enter(0, 0)  # a former engine that was killed in a step left that in the page
        waits = pauses(0.05, 1.0)
        while True:
            try:
                with translated("serving-guard", self._target):
                    await self._announce()
            except Superseded as error:
                if self._permitted.is_set():
                    self._superseded.set()
                    return
                log.warning("another worker with this id borrows here", reason=str(error))
            except EbbtideError as error:
                if str(error) != self._reason:
                    self._reason = str(error)
                    log.info("no guard lends the device yet", reason=self._reason)
            await asyncio.sleep(next(waits))

    async def _announce(self) -> None:
        call = self._stub.Borrow()
        self._sequence = 0
        try:
            await write(call, grants_pb2.BorrowerMessage(hello=to_proto(self._hello(), grants_pb2.Hello)))
            await race(self._receive(call), self._report(call))
        finally:
            call.cancel()

    def _hello(self) -> Hello:
        """Without slots: there is no engine yet. Its processes will be children of this one."""
        return Hello(
            protocol_version=GRANTS_VERSION,
            worker_id=self._worker_id,
            pids=(os.getpid(),),
            kv_bytes=self._engine.kv_bytes,
            weights_bytes=self._engine.weights_bytes,
            device=self._engine.device,
        )

    async def _receive(self, call: Any) -> None:
        async for message in call:
            grant = from_proto(message, Grant)
            first, self._sequence = not self._sequence, grant.sequence
            if first or grant.residency is not self._wished:  # an owner that takes its device back waits for an answer
                self._wished = grant.residency
                self._news.set()
            if grant.residency is Residency.AWAKE and not self._permitted.is_set():
                self._permitted.set()
        raise Unavailable("the guard ended the stream")

    async def _report(self, call: Any) -> None:
        told: object = None
        told_at = 0.0
        while True:
            self._news.clear()
            booting = self._permitted.is_set()
            news = booting, self._wished, self._sequence > 0
            if news != told or time.monotonic() - told_at >= _NO_NEWS_S:
                told, told_at = news, time.monotonic()
                report = BorrowerReport(
                    residency=Residency.AWAY, moving=booting, grant=self._sequence, wake_away_s=_QUIET_S
                )
                await write(call, grants_pb2.BorrowerMessage(report=to_proto(report, grants_pb2.Report)))
            with suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_S):
                    await self._news.wait()
