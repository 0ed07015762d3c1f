"""Borrows the device from the serving-guard of its host: grants come in, reports of the engine go out, and the engine's
weights move as the grants wish (`WeightSleep`).

Invariant: grants go to the `DeviceLease` alone, which ends with the stream. Without a guard, this retries forever: the
worker stays attached, and its heartbeats say that it may not generate. Nothing of this outlives the process; the next
one begins with Hello.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from ebbtide import telemetry
from ebbtide.errors import EbbtideError, Unavailable
from ebbtide.rollout_worker import metrics
from ebbtide.rollout_worker.device_lease import DeviceLease
from ebbtide.rollout_worker.engine import EngineFailed
from ebbtide.rollout_worker.engine.vllm.borrowed_engine import BorrowedEngine
from ebbtide.rollout_worker.generation.local_attempts import LocalAttempts
from ebbtide.rollout_worker.installs.installer import Installer
from ebbtide.rpc.backoff import pauses
from ebbtide.rpc.channel import write
from ebbtide.rpc.status_table import translated
from ebbtide.runtime import race
from ebbtide.types.fleet import BorrowedState
from ebbtide.types.grants import GRANTS_VERSION, BorrowerReport, Grant, Hello, Residency
from ebbtide.v1 import grants_pb2
from ebbtide.v1.grants_pb2_grpc import GrantsStub
from ebbtide.wire import from_proto, to_proto

if TYPE_CHECKING:
    from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine

log = telemetry.get_logger(__name__)

#: Interval of reports to the guard while something changes.
_REPORT_S: Final = 0.1
#: Report interval when nothing changed. The guard assumes that a worker hangs after a second of silence.
_NO_NEWS_S: Final = 0.4
#: Interval of looks whether the engine may generate.
_LOOK_S: Final = 0.05
#: Tokens are flushed when the engine has stood still for so long: it will probably not go on soon.
_STILL_S: Final = 0.1
#: After so long, heartbeats say to expect no tokens.
_HELD_S: Final = 0.25
#: After a stream of this length, the next one opens soon.
_LONG_S: Final = 10.0
_HOLD: Final = "grant"


class WeightSleep:
    """Moves the weights of a borrowed engine to where the guard's grants wish them.

    The caller sets the page's limit for keys and values before.

    Invariant: `residency` is where the weights are, whole; between two levels it is the one that promises less. At
    every level, requests keep their tokens: they wait, and the engine computes or loads again what it gave up.

    - On a GPU vLLM's sleep mode gives all memory of the engine back at either level. At HOST a copy of the weights
      waits in host memory; at AWAY there is none. The engine goes to either level from AWAKE alone: at HOST it has
      given the GPU's memory back already, and could drop its copy only by taking that memory again.
    - On a CPU build weights lie in host memory anyway: HOST means that the engine gives up all memory of keys and
      values, and AWAY that of the weights too.

    An engine whose grant leaves it no keys and values gives their memory back, and keeps its weights where they are:
    on a GPU too, where a smaller part would free nothing.

    From AWAY, an install of the version that the engine served, or of the target by now, brings the weights back
    from the host's mirror.
    """

    def __init__(self, engine: "VllmEngine", installer: Installer) -> None:
        self._engine, self._installer = engine, installer
        self._moving = asyncio.Lock()
        self.residency = Residency.AWAKE
        self.has_cache = True  # while the weights are awake: whether there is memory for keys and values
        #: Duration of the last wake-up from either level; 0: there was none yet.
        self.wake_host_s = self.wake_away_s = 0.0
        self._hindrance = ""  # why the weights did not come back lately

    @property
    def moving(self) -> bool:
        """Whether the weights are on their way."""
        return self._moving.locked()

    async def be(self, wanted: Residency) -> None:
        """Move the weights, if it is possible now: `residency` tells, and callers may try again. Raises `EngineFailed`
        if the engine is lost."""
        async with self._moving:
            if wanted is Residency.AWAKE:
                await self._wake()
            elif wanted > self.residency:
                await self._go_down(wanted)

    async def keep_cache(self, *, wanted: bool) -> None:
        """Have memory for keys and values or none, if the weights are awake. Raises `EngineFailed`."""
        async with self._moving:
            if self.residency is not Residency.AWAKE or wanted is self.has_cache:
                return
            await (self._engine.take_cache() if wanted else self._engine.release_cache())
            self.has_cache = wanted

    async def _go_down(self, wanted: Residency) -> None:
        by_stages = self._engine.by_stages
        if self.residency is Residency.HOST and not by_stages:
            return
        if wanted is Residency.AWAY and not self._installer.rest():
            wanted = Residency.HOST  # there is no version to come back to, or one is being installed
        start = time.monotonic()
        if self.residency is Residency.AWAKE and (by_stages or wanted is Residency.HOST):
            await self._engine.give_up_cache()
            self.residency = Residency.HOST
        if wanted is Residency.AWAY:
            self.residency = Residency.AWAY
            await self._engine.give_up_weights()
        log.info("memory given up", residency=self.residency.name.lower(), took_s=round(time.monotonic() - start, 4))

    async def _wake(self) -> None:
        was, start = self.residency, time.monotonic()
        if was is Residency.AWAY:
            try:
                await self._installer.restore()
            except EngineFailed:
                raise
            except EbbtideError as error:
                if str(error) != self._hindrance:  # each grant asks again, several times a second
                    self._hindrance = str(error)
                    log.warning("weights do not come back yet", reason=self._hindrance)
                return
        elif was is Residency.HOST:
            await self._engine.wake()
        self.residency, self._hindrance = Residency.AWAKE, ""
        self.has_cache = self.has_cache or was is not Residency.AWAKE  # a wake-up brings all memory
        took_s = time.monotonic() - start
        if was is Residency.AWAY:
            self.wake_away_s = took_s
        elif was is Residency.HOST:
            self.wake_host_s = took_s
        if was is not Residency.AWAKE:
            log.info("awake", took_s=round(took_s, 4))


class GuardLink:
    """One worker's side of the grants."""

    def __init__(
        self,
        stub: GrantsStub,
        target: str,
        engine: BorrowedEngine,
        lease: DeviceLease,
        attempts: LocalAttempts,
        sleeping: WeightSleep | None,
        *,
        worker_id: str,
        slots: int,
    ) -> None:
        """`engine` has booted. `sleeping` moves its weights; None: they stay."""
        self._stub, self._target, self._engine, self._attempts = stub, target, engine, attempts
        self._page, self._lease, self._sleeping = engine.page, lease, sleeping
        self._worker_id, self._slots = worker_id, slots
        self._news = asyncio.Event()  # set when a report is due at once
        self._reason = ""  # why there is no guard
        self._wished = asyncio.Event()  # set when the weights are not where the newest grant wishes them
        self._able_at = time.monotonic()  # when the engine last generated, or could
        self._flushed = True

    @property
    def state(self) -> BorrowedState:
        """The state of the loan, for heartbeats."""
        forecast = self._lease.forecast
        return BorrowedState(
            granted=_HOLD not in self._attempts.holds and self._lease.connected,
            share=min(1.0, forecast.share),
            spell_s=forecast.spell_s,
            disturbance=forecast.disturbance,
            asleep=self._at is not Residency.AWAKE,
            hand_over=forecast.hand_over,
        )

    def want(self, *, wanted: bool, reason: str) -> None:
        """Apply the coordinator's decision whether to borrow this host."""
        if wanted != self._lease.wanted:
            log.info("to be borrowed" if wanted else "not to be borrowed", reason=reason)
        self._lease.want(wanted=wanted)
        self._news.set()

    async def run(self) -> None:
        """Keep a stream to the guard open, forever."""
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
        """Hold generation and flush tokens while the engine stands still, forever."""
        while True:
            self._look()
            await asyncio.sleep(_LOOK_S)

    async def move(self) -> None:
        """Move the weights to where the guard wishes them, forever. Raises `EngineFailed`."""
        while True:
            await self._wished.wait()
            self._wished.clear()
            if self._sleeping is not None:
                await self._sleeping.be(self._lease.residency)
                await self._sleeping.keep_cache(wanted=self._cached)
                self._news.set()

    @property
    def _at(self) -> Residency:
        return self._sleeping.residency if self._sleeping is not None else Residency.AWAKE

    @property
    def _cached(self) -> bool:
        """Whether the newest grant leaves memory for keys and values."""
        return bool(self._page.kv_blocks)

    async def _borrow(self) -> None:
        call = self._stub.Borrow()
        try:
            hello = to_proto(self._hello(), grants_pb2.Hello)
            await write(call, grants_pb2.BorrowerMessage(hello=hello))
            await race(self._receive(call), self._report(call))
        finally:
            call.cancel()
            self._lease.end()

    async def _receive(self, call: Any) -> None:
        async for message in call:
            self._take(from_proto(message, Grant))
        raise Unavailable("the guard ended the stream")

    def _take(self, grant: Grant) -> None:
        if not self._lease.connected:
            self._reason = ""
            log.info("guard found", target=self._target)
        self._lease.take(grant)
        sleeping = self._sleeping
        if sleeping is not None and (grant.residency is not self._at or sleeping.has_cache is not self._cached):
            self._wished.set()
        self._look()

    async def _report(self, call: Any) -> None:
        told: object = None
        told_at = 0.0
        while True:
            self._news.clear()
            report = self._news_of_engine()
            news = replace(report, grant=0), self._lease.residency  # that grants were renewed is none
            if news != told or time.monotonic() - told_at >= _NO_NEWS_S:
                told, told_at = news, time.monotonic()
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
            wanted=self._lease.wanted,
            wake_host_s=self._sleeping.wake_host_s if self._sleeping else 0.0,
            wake_away_s=self._sleeping.wake_away_s if self._sleeping else 0.0,
            grant=self._lease.sequence,
            moving=self._sleeping.moving if self._sleeping else False,
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
        """Hold generation unless the engine generates or could."""
        now, steps, holds = time.monotonic(), self._page.steps(), self._attempts.holds
        # Requests that wait while none runs lack memory: a budget does not help them.
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
        """Log each reason once: a guard may well be away for long."""
        if reason != self._reason:
            log.info("without a guard: the engine stands still", reason=reason)
            self._reason = reason


def family(pid: int) -> Iterator[int]:
    """A process and its descendants; this very process alone."""
    yield pid
    if pid == os.getpid():
        return
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from family(int(child))
