"""A borrowed worker and the serving-guard of its host: grants come in, the lease in the page is renewed, news go out.

Invariant: the lease ends at most `GRANT_S` behind the arrival of the newest grant, at once with the stream, and it is
never renewed while the coordinator does not want this host borrowed; so without a guard, or with one that hangs, the
engine stands still by itself. A guard that is not there is looked for again, for ever: the worker stays attached, and
its heartbeats say that it may not generate. Nothing of this outlives the process; the next one begins with Hello.
"""

import asyncio
import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ebbtide import telemetry
from ebbtide.errors import EbbtideError, Unavailable
from ebbtide.rollout_worker import metrics
from ebbtide.rollout_worker.engine.vllm.borrowed_engine import BorrowedEngine
from ebbtide.rollout_worker.engine.weight_sleep import WeightSleep
from ebbtide.rollout_worker.generation.local_attempts import LocalAttempts
from ebbtide.rpc.backoff import pauses
from ebbtide.rpc.channel import write
from ebbtide.rpc.status_table import translated
from ebbtide.runtime import race
from ebbtide.types.fleet import BorrowedState
from ebbtide.types.grants import GRANT_S, GRANTS_VERSION, BorrowerReport, Forecast, Grant, Hello, Residency
from ebbtide.v1 import grants_pb2
from ebbtide.v1.grants_pb2_grpc import GrantsStub
from ebbtide.wire.record_conversion import from_proto, to_proto

log = telemetry.get_logger(__name__)

#: The guard is told what runs here so often, and at changes at once;
_REPORT_S: Final = 0.1
#: if there is no news, so seldom. It takes a worker that says nothing for a second for one that hangs.
_NO_NEWS_S: Final = 0.4
#: How often it is looked whether the engine may generate.
_LOOK_S: Final = 0.05
#: An engine that stood still for so long will not go on in this moment: what it made is flushed.
_STILL_S: Final = 0.1
#: And after so long nothing is to be expected of it: the coordinator is told.
_HELD_S: Final = 0.25
#: For how long an install waits for a spell: without one it disturbs who is served, without it the run may wait.
_PATIENCE_S: Final = 5.0
#: Between two looks for a grant then.
_PAUSE_S: Final = 0.01
#: A stream that lasted so long was a good one: the next is opened soon.
_LONG_S: Final = 10.0
_HOLD: Final = "grant"


class GuardLink:
    """One worker's side of the grants."""

    def __init__(
        self,
        stub: GrantsStub,
        target: str,
        engine: BorrowedEngine,
        attempts: LocalAttempts,
        *,
        worker_id: str,
        slots: int,
    ) -> None:
        """`engine` has booted."""
        self._stub, self._target, self._engine, self._attempts = stub, target, engine, attempts
        self._page = engine.page
        self._worker_id, self._slots = worker_id, slots
        self._forecast = Forecast()
        self._wanted = True
        self._news = asyncio.Event()
        self._connected = False
        self._reason = ""
        #: What moves the engine's weights; None: they stay.
        self.sleeping: WeightSleep | None = None
        self._residency = Residency.AWAKE  # as wished by the newest grant,
        self._granted_at = -math.inf  # which came then
        self._wished = asyncio.Event()
        self._able_at = time.monotonic()  # when the engine was last seen to generate, or to be free to
        self._flushed = True

    @property
    def state(self) -> BorrowedState:
        """For the coordinator: what this worker may expect."""
        forecast = self._forecast
        return BorrowedState(
            granted=_HOLD not in self._attempts.holds and self._connected,
            share=min(1.0, forecast.share),
            spell_s=forecast.spell_s,
            disturbance=forecast.disturbance,
            asleep=self._at is not Residency.AWAKE,
        )

    def want(self, *, wanted: bool, reason: str) -> None:
        """Told by the coordinator whether this host is to be borrowed."""
        if wanted != self._wanted:
            log.info("to be borrowed" if wanted else "not to be borrowed", reason=reason)
        self._wanted = wanted
        if not wanted:
            self._page.renew(0.0)
        self._news.set()

    async def run(self) -> None:
        """Hold the stream to the guard, one after the other, for ever."""
        waits = pauses(0.05, 1.0)
        while True:
            began = time.monotonic()
            try:
                with translated("serving-guard", self._target):
                    await self._borrow()
            except EbbtideError as error:
                self._say_apart(str(error))
            if time.monotonic() - began > _LONG_S:
                waits = pauses(0.05, 1.0)
            await asyncio.sleep(next(waits))

    async def watch(self) -> None:
        """Hold and flush as the engine stands still, for ever."""
        while True:
            self._look()
            await asyncio.sleep(_LOOK_S)

    async def move(self) -> None:
        """Have the weights where the guard wants them, for ever. Raises `EngineFailed`."""
        while True:
            await self._wished.wait()
            self._wished.clear()
            if self.sleeping is not None:
                await self.sleeping.be(self._residency)
                self._news.set()

    @property
    def _at(self) -> Residency:
        return self.sleeping.residency if self.sleeping is not None else Residency.AWAKE

    async def spell(self, seconds: float) -> None:
        """Wait until nothing is inside the serving engine and probably nothing will be for so long, so that the device
        is free for work other than steps; but not for ever."""
        end = time.monotonic() + _PATIENCE_S
        while not self._spell_of(seconds):
            if time.monotonic() > end:
                log.warning("no grant for so long came: going on without one", waited_s=_PATIENCE_S, wanted_s=seconds)
                return
            await asyncio.sleep(_PAUSE_S)

    def _spell_of(self, seconds: float) -> bool:
        idle = self._page.budget().tokens and self._page.idle()
        forecast = self._forecast.spell_s  # 0: not known
        return bool(idle) and (not forecast or forecast >= seconds)

    def may_wake(self) -> bool:
        """Whether the guard wishes the weights awake, in a grant that holds. That is the permission to load them: the
        guard gives neither tokens nor a budget to an engine that does not have any."""
        return self._residency is Residency.AWAKE and time.monotonic() - self._granted_at < GRANT_S

    async def _borrow(self) -> None:
        call = self._stub.Borrow()
        try:
            hello = to_proto(self._hello(), grants_pb2.Hello)
            await write(call, grants_pb2.BorrowerMessage(hello=hello))
            await race(self._receive(call), self._report(call))
        finally:
            call.cancel()
            self._page.renew(0.0)
            self._connected, self._forecast, self._granted_at = False, Forecast(), -math.inf

    async def _receive(self, call: Any) -> None:
        async for message in call:
            self._take(from_proto(message, Grant))
        raise Unavailable("the guard ended the stream")

    def _take(self, grant: Grant) -> None:
        if not self._connected:
            self._connected, self._reason = True, ""
            log.info("guard found", target=self._target)
        self._forecast = grant.forecast
        steps = self._page.steps()
        if steps.block_bytes:
            blocks = grant.kv_bytes // steps.block_bytes
            blocks = blocks if blocks < steps.kv_total else -1
            if blocks != self._page.kv_blocks:
                self._page.limit_kv(blocks)
        self._residency, self._granted_at = grant.residency, time.monotonic()
        if self.sleeping is not None and grant.residency is not self._at:
            self._wished.set()
        free = self._wanted and grant.tokens > 0
        self._page.renew(time.monotonic() + min(grant.expires_s, GRANT_S) if free else 0.0)
        self._look()

    async def _report(self, call: Any) -> None:
        told, told_at = None, 0.0
        while True:
            self._news.clear()
            report = self._news_of_engine()
            if report != told or time.monotonic() - told_at >= _NO_NEWS_S:
                told, told_at = report, time.monotonic()
                await write(call, grants_pb2.BorrowerMessage(report=to_proto(report, grants_pb2.Report)))
            with suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_S):
                    await self._news.wait()

    def _news_of_engine(self) -> BorrowerReport:
        steps = self._page.steps()
        return BorrowerReport(
            running=self._attempts.running,
            tokens_generated=self._attempts.tokens,
            kv_bytes_used=steps.kv_used * steps.block_bytes,
            recomputed_tokens=steps.recomputed,
            residency=self._at,
            wanted=self._wanted,
            wake_host_s=self.sleeping.wake_host_s if self.sleeping else 0.0,
            wake_away_s=self.sleeping.wake_away_s if self.sleeping else 0.0,
        )

    def _hello(self) -> Hello:
        steps = self._page.steps()
        return Hello(
            protocol_version=GRANTS_VERSION,
            worker_id=self._worker_id,
            pids=tuple(family(steps.pid)),
            slots=self._slots,
            step_tokens=self._engine.step_tokens,
            kv_bytes=steps.kv_total * steps.block_bytes,
            weights_bytes=self._engine.weights_bytes,
            device=self._engine.device,
        )

    def _look(self) -> None:
        """Whether the engine generates, or could: then nothing is held."""
        now, steps, holds = time.monotonic(), self._page.steps(), self._attempts.holds
        # What waits while nothing runs lacks memory: a budget alone does not help it.
        without = not self._page.kv_blocks or (steps.waiting and not steps.running)
        starved = self._at is not Residency.AWAKE or (steps.kv_total and without)
        if steps.stepping or (self._page.budget().tokens and not starved):
            self._able_at = now
        self._able_at = max(self._able_at, steps.ended)
        still_s = now - self._able_at
        if still_s < _STILL_S:
            self._flushed = False
        elif not self._flushed:
            self._attempts.flush()
            self._flushed = True
        if (still_s > _HELD_S) != (_HOLD in holds):
            (holds.begin if still_s > _HELD_S else holds.end)(_HOLD)
            metrics.GRANTED.set(still_s <= _HELD_S)

    def _say_apart(self, reason: str) -> None:
        """Once for each reason: a guard may be away for long, and that is normal."""
        if reason != self._reason:
            log.info("without a guard: the engine stands still", reason=reason)
            self._reason = reason


def family(pid: int) -> Iterator[int]:
    """A process and all below it; of this very process, itself alone."""
    yield pid
    if pid == os.getpid():
        return
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from family(int(child))
