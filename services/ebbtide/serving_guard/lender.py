"""Lends a device, whoever owns it: issues grants, makes engines keep to them, and takes all back in order.

A server's and a trainer's lender each bring a keeper, which writes into the pages what engines may do, and what memory
their grants allow. The socket where workers connect and the enforcer are here, and the order in which all ends.
"""

import asyncio
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec
from msgspec import Struct

from ebbtide import telemetry
from ebbtide.auth.security import ServerSettings
from ebbtide.errors import InvalidRequest, Superseded
from ebbtide.grants import socket_path
from ebbtide.rpc.server import Server, Service
from ebbtide.runtime import Shutdown
from ebbtide.serving_guard import borrower_processes
from ebbtide.serving_guard.borrower_processes import BorrowerProcess
from ebbtide.serving_guard.borrowers import ENFORCED, UNREADABLE, AllowedMemory, BorrowerTable, Loan, borrower_status
from ebbtide.serving_guard.device_ownership import OwnerLease
from ebbtide.serving_guard.servicer import GRANTS, GrantServicer
from ebbtide.serving_guard.settings import GuardSettings
from ebbtide.telemetry import rpc_observer
from ebbtide.types.grants import GRANT_S, Borrower, BorrowerReport, Forecast, Grant, GuardStatus, Hello, Residency
from ebbtide.v1 import grants_pb2 as pb
from ebbtide.v1.grants_pb2_grpc import add_GrantsServicer_to_server
from ebbtide.wire import from_proto, to_proto

log = telemetry.get_logger(__name__)

_Message = TypeVar("_Message")


class GrantIssuer:
    """Computes what a worker's next grant says. `memory(loan)`: what a borrower may use now. `forecast()`: what
    borrowers may expect."""

    def __init__(
        self,
        borrowers: BorrowerTable,
        *,
        memory: Callable[[Loan], AllowedMemory],
        forecast: Callable[[], Forecast],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._borrowers, self._memory = borrowers, memory
        self._forecast, self._clock = forecast, clock
        self._last: dict[str, AllowedMemory] = {}

    def allowed(self, loan: Loan) -> AllowedMemory:
        """The memory that the borrower may use now."""
        return AllowedMemory(0, "", Residency.AWAKE) if loan.gone_at is not None else self._memory(loan)

    def issue(self, loan: Loan, sequence: int) -> Grant:
        allowed = self.allowed(loan)
        may = self._borrowers.open and loan.granted(self._clock()) and allowed.phase != UNREADABLE
        return Grant(
            sequence=sequence,
            tokens=(loan.hello.step_tokens or 1) if may else 0,
            sequences=(loan.hello.slots or 1) if may else 0,
            expires_s=GRANT_S if may else 0.0,
            kv_bytes=allowed.kv_bytes,
            residency=allowed.residency,
            forecast=self._forecast(),
        )

    def send_changes(self) -> None:
        """Have grants sent before their time if the memory that a borrower may use has changed."""
        now = {loan.worker_id: self.allowed(loan) for loan in self._borrowers.all()}
        if now != self._last:
            self._last = now
            self._borrowers.news.set()


#: Who opens a stream sends the first message within this time.
_FIRST_S: Final = 5.0
#: Its first report follows at once. Until then it is unknown whether its weights are awake.
_REPORT_S: Final = 0.25
#: A grant holds for 200 ms, so two of three may come late.
_RENEW_S: Final = 0.06


class GrantStream:
    """Serves the streams of all borrowers: Hello, grants and reports. A servicer's `Borrow` is its `serve`."""

    def __init__(self, borrowers: BorrowerTable, issuer: GrantIssuer) -> None:
        self._borrowers, self._issuer = borrowers, issuer

    async def serve(self, requests: AsyncIterator[pb.BorrowerMessage]) -> AsyncGenerator[pb.Grant, None]:
        """Lend to one worker until its stream ends. Raises `InvalidRequest`, `NotReady` or `Superseded`."""
        loan = self._borrowers.join(await _hello(requests))
        reader = asyncio.create_task(self._read(requests, loan))
        reason = "its stream broke"
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_S):
                    await loan.reported.wait()
            for sequence in count(1):
                loan.issued = sequence
                yield to_proto(self._issuer.issue(loan, sequence), pb.Grant)
                if loan.gone_at is not None:
                    raise Superseded("this grant is over: the worker connected again, or had to be killed")
                await await_news(self._borrowers.news, reader, _RENEW_S)  # until the next grant is due, or changes
                if reader.done():
                    reason = "it closed its stream"
                    reader.result()
                    break
        except InvalidRequest as error:
            reason = f"it sent an invalid message: {error}"
            raise
        finally:
            reader.cancel()
            self._borrowers.leave(loan, reason)

    async def _read(self, requests: AsyncIterator[pb.BorrowerMessage], loan: Loan) -> None:
        async for message in requests:
            if message.WhichOneof("kind") != "report":
                raise InvalidRequest("only the first message may be hello; send reports after it", field="kind")
            self._borrowers.record_report(loan, from_proto(message.report, BorrowerReport, field="report"))


async def first_message(requests: AsyncIterator[_Message]) -> _Message | None:
    """The first message of a stream; None if it ends, or stays silent, before that."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_S):
            return await anext(requests, None)
    return None


async def await_news(news: asyncio.Event, reader: asyncio.Task[None], timeout_s: float) -> None:
    """Wait until there are news, which then count as known, the `reader` of a stream ends, or `timeout_s` is over."""
    awaited = asyncio.ensure_future(news.wait())
    try:
        await asyncio.wait((awaited, reader), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        awaited.cancel()
    news.clear()


async def _hello(requests: AsyncIterator[pb.BorrowerMessage]) -> Hello:
    first = await first_message(requests)
    if first is None or first.WhichOneof("kind") != "hello":
        raise InvalidRequest("the first message must be hello", field="kind")
    return from_proto(first.hello, Hello, field="hello")


#: How often engines are checked: while a step goes on without a budget, and otherwise.
_SUSPECT_S: Final = 0.01
_LOOK_S: Final = 0.05
#: A stopped engine is continued once there has been a budget for this long: then its step fits into idle time.
_CALM_S: Final = 0.1
#: One step may begin as the budget is taken. A second one is no accident.
_ACCIDENTS: Final = 1
#: How long an engine is watched after its stream ended.
_PARTING_S: Final = 2.0


class LateStep(Struct, frozen=True):
    """A step that began at `began` and was found to be late. `waits`: how long each thread had waited for a core."""

    began: float
    waits: dict[int, float]


class Enforcer:
    """Stops and kills engines that go on after their budget was taken back: an engine cannot veto a hand-back.

    Invariant: an engine without a budget runs no longer than its predicted step and `yield_s`. Then its processes and
    all their children are stopped (SIGSTOP). Time in which it waited for a core does not count, up to `kill_s`: where
    other programs take the cores, its step is late, but takes nothing from the owner. A stopped engine is continued
    when there is a budget again, because it finishes its step first. It is killed (SIGKILL) if there is no budget for
    `kill_s`, if it was stopped `most` times lately, or if its stream ended meanwhile. Its rollouts continue elsewhere:
    the coordinator gets no more tokens, or sees its worker go.

    `predicted_s()`: the longest that a rollout step takes, as far as known. `granting()`: whether there is a budget.
    `send(processes, signal)` is `borrower_processes.send`, and returns how many processes got the signal.
    `waits(processes)`: seconds that each of their threads has waited for a core.
    """

    def __init__(
        self,
        borrowers: BorrowerTable,
        *,
        yield_s: float,
        kill_s: float,
        most: int,
        predicted_s: Callable[[], float],
        granting: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        send: Callable[[Iterable[BorrowerProcess], signal.Signals], int] = borrower_processes.send,
        waits: Callable[[Iterable[BorrowerProcess]], dict[int, float]] = borrower_processes.core_waits,
    ) -> None:
        self._borrowers, self._clock, self._send, self._waits = borrowers, clock, send, waits
        self._yield_s, self._kill_s, self._most = yield_s, kill_s, most
        self._predicted_s, self._granting = predicted_s, granting
        self._calm_since: float | None = None
        self._late: dict[str, LateStep] = {}  # by worker

    async def run(self) -> None:
        """Check all engines, forever."""
        while True:
            suspect = self.check()
            await asyncio.sleep(_SUSPECT_S if suspect else _LOOK_S)

    def check(self) -> bool:
        """Check once. Returns whether an engine still steps without a budget, and may have to be stopped."""
        now = self._clock()
        self._calm_since = (self._calm_since or now) if self._granting() else None
        suspects = [self._check(loan, now) for loan in self._borrowers.all()]
        suspects += [self._check_parting(loan, now) for loan in list(self._borrowers.parting)]
        return any(suspects)

    def close(self) -> None:
        """Continue stopped engines: without a lender nothing else would."""
        for loan in self._borrowers.all():
            if loan.stopped_at is not None:
                self._continue(loan, self._clock())

    def _check(self, loan: Loan, now: float) -> bool:
        if loan.stopped_at is not None:
            if now - loan.stopped_at > self._kill_s and self._calm_since is None:
                self._kill(loan, "there was no budget to continue it")
            elif self._calm_since is not None and now - self._calm_since >= _CALM_S:
                self._continue(loan, now)
            return False
        why = self._violation(loan, now)
        if why:
            strikes = loan.account.recent_strikes(now)
            if strikes >= self._most:
                self._kill(loan, f"{why}, and it was stopped {strikes} times lately")
            else:
                self._stop(loan, now, why)
        return loan.taken_at is not None and loan.stepping_since() is not None

    def _check_parting(self, loan: Loan, now: float) -> bool:
        """An engine whose stream ended may finish its step, and no more."""
        if loan.stopped_at is not None:
            self._kill(loan, "its stream ended while it was stopped")
        elif why := self._violation(loan, now):
            self._kill(loan, f"{why}, and its stream has ended")
        elif loan.gone_at is None or now - loan.gone_at > _PARTING_S + self._yield_s:
            self._late.pop(loan.worker_id, None)
            self._borrowers.forget(loan)
            return False
        return loan.stepping_since() is not None

    def _violation(self, loan: Loan, now: float) -> str:
        """Why the engine has to be stopped; empty: it does not have to, as one that boots, which was permitted to, or
        one that is not there."""
        if (
            loan.taken_at is None
            or not loan.hello.slots
            or not any(borrower_processes.alive(process) for process in loan.processes)
        ):
            return ""
        steps = loan.page.steps()
        begun = steps.steps - loan.steps_when_taken
        if begun > _ACCIDENTS:
            return f"it began {begun} steps without a budget"
        late_s = now - loan.taken_at - self._predicted_s()
        if not steps.stepping or late_s <= 0.0:
            self._late.pop(loan.worker_id, None)
            return ""
        late_s -= self._waited_s(loan, steps.began)
        if late_s > self._yield_s and steps.began <= now - self._yield_s:
            return f"its step is {late_s:.3f} s longer than predicted"
        return ""

    def _waited_s(self, loan: Loan, began: float) -> float:
        """How long the engine has waited for a core since its step was found late: the thread that waited longest. At
        most `kill_s`, because threads also wait for others of their engine.
        """
        waits, late = self._waits(loan.processes), self._late.get(loan.worker_id)
        if late is None or late.began != began:
            self._late[loan.worker_id] = late = LateStep(began, waits)
        longest = max((waited - late.waits.get(thread, 0.0) for thread, waited in waits.items()), default=0.0)
        return min(longest, self._kill_s)

    def _stop(self, loan: Loan, now: float, why: str) -> None:
        sent = self._send(loan.processes, signal.SIGSTOP)
        loan.stop(now)
        self._note("stopped", loan, why, sent)
        self._borrowers.changed()

    def _continue(self, loan: Loan, now: float) -> None:
        loan.resume(now)
        self._borrowers.changed()  # the budget comes first, because the engine goes on in the middle of a step
        self._note("continued", loan, "there is a budget", self._send(loan.processes, signal.SIGCONT))

    def _kill(self, loan: Loan, why: str) -> None:
        self._late.pop(loan.worker_id, None)
        self._note("killed", loan, why, self._send(loan.processes, signal.SIGKILL))
        self._borrowers.leave(loan, "it had to be killed", watched=False)
        self._borrowers.forget(loan)

    def _note(self, what: str, loan: Loan, why: str, sent: int) -> None:
        ENFORCED.labels(what).inc()
        write = log.info if what == "continued" else log.warning
        write(f"worker {what}", worker_id=loan.worker_id, reason=why, processes=sent, stops=loan.account.stops)


#: Streams end at once, with `Draining`; no other call is worth waiting for.
_GRACE_S: Final = 0.5


class Keeper(Protocol):
    """Keeps in the pages what engines may do. `granting`: whether that is anything now. `step_s`: the longest that a
    rollout step takes, as far as known."""

    @property
    def granting(self) -> bool: ...

    @property
    def step_s(self) -> float: ...

    def review(self) -> None:
        """Decide now."""
        ...

    def close(self) -> None:
        """Take everything back, for good."""
        ...


class Lender(ABC):
    """What the lenders of a server's and of a trainer's device share. It is started once."""

    def __init__(
        self,
        settings: GuardSettings,
        borrowers: BorrowerTable,
        keeper: Keeper,
        issuer: GrantIssuer,
        more: Iterable[Service] = (),
    ) -> None:
        """`more`: services besides Grants on the same socket."""
        self._settings, self._borrowers, self._keeper, self._issuer = settings, borrowers, keeper, issuer
        self._enforcer = Enforcer(
            borrowers,
            yield_s=settings.yield_ms / 1000,
            kill_s=settings.kill_s,
            most=settings.max_stops,
            predicted_s=lambda: keeper.step_s,
            granting=lambda: keeper.granting,
        )
        grants = GrantServicer(GrantStream(borrowers, issuer).serve, self.status)
        self.services: list[Service] = [(add_GrantsServicer_to_server, grants, GRANTS), *more]
        socket = socket_path(Path(settings.grant_dir)).absolute()
        self._server = Server(ServerSettings.at(f"unix:{socket}"), self.services, observe=rpc_observer(), private=True)

    @property
    def address(self) -> str:
        """Where those connect whom it serves first."""
        return self._server.address

    @abstractmethod
    def status(self) -> GuardStatus:
        """What `WatchGuard` tells."""

    async def start(self, shutdown: Shutdown) -> None:
        self._keeper.review()
        await self._server.start()
        for name, work in self._work().items():
            shutdown.spawn(work, name)
        await self._server.set_serving(True)

    async def stop(self) -> None:
        """End grants first: the owner has its device to itself while no guard runs."""
        self._stop_lending()
        self._enforcer.close()
        await self._server.stop(_GRACE_S)

    def _work(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What runs all the time, by name."""
        return {"enforcer": self._enforcer.run()}

    def _borrower_statuses(self, now: float) -> tuple[Borrower, ...]:
        return tuple(borrower_status(loan, self._issuer.allowed(loan), now) for loan in self._borrowers.all())

    def _stop_lending(self) -> None:
        self._borrowers.close()
        self._keeper.close()


#: The file, in the folder of grants.
RECORD: Final = "leases.json"
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class _Record(Struct, frozen=True, kw_only=True):
    boot: str = ""  # a host that was started anew has no older trainer
    leases: tuple[OwnerLease, ...] = ()


class LeaseRecord:
    """Remembers the newest lease of each run across lives of the guard, in a file in the folder of grants.

    Without it, a guard that has just begun would take an older trainer's wish if that one connected first, and lend a
    device in whose newer trainer a step is under way.

    Invariant: the file holds the leases of this boot of the host that the guard has met, whole: it is replaced, never
    changed. It is written before a new lease is answered. Lost with it: only the refusal of older leases, and of guards
    that are not told of the owner.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._boot = folder / RECORD, _BOOT.read_text().strip()
        self._written: tuple[OwnerLease, ...] = ()

    def read(self) -> tuple[OwnerLease, ...]:
        """The leases of the guard's earlier lives; none if the file is absent or damaged."""
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=_Record)
        except FileNotFoundError:
            return ()
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("earlier leases cannot be read", path=str(self._path), reason=str(error))
            return ()
        self._written = found.leases if found.boot == self._boot else ()
        return self._written

    def write(self, leases: Iterable[OwnerLease]) -> None:
        """Keep these leases, unless they are there. A full disk costs the refusal of older leases after a restart."""
        if (now := tuple(leases)) == self._written:
            return
        beside = self._path.with_suffix(".new")
        try:
            beside.write_bytes(msgspec.json.encode(_Record(boot=self._boot, leases=now)))
            beside.replace(self._path)
        except OSError as error:
            log.warning("leases cannot be kept", path=str(self._path), reason=str(error))
            return
        self._written = now
