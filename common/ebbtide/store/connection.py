"""Keeps one pipelined connection to Redis, reconnects by itself, and says what a refusal means and what to do.

Invariant: commands go out in the order of `call`, and replies come back in that order, so `_sent` pairs them.
`incarnation` names the store's server and data, and is read first on every new link. When a link breaks, all of `_sent`
fails; each caller sends again on the next link of the same incarnation, so every command must be safe to repeat: reads,
and fenced scripts. Another incarnation may have forgotten what the caller relied on: the call fails, and the caller
decides. With `replicas`, a reply is returned only after so many of them confirmed all writes before it. Nothing
outlives the process; commands on a broken link may or may not have run. `durability` says what would survive a crash.

`Topic` runs scripts under the coordinator's term, and turns common refusals into errors.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, cast

import hiredis
import redis.exceptions
from redis.asyncio.connection import AbstractConnection

from ebbtide.errors import Draining, EbbtideError, Internal, LeaseSuperseded, NotFound, StoreUnavailable
from ebbtide.store.dialer import ReplyChunks, dialer, greet
from ebbtide.store.durability import DurabilityWatch
from ebbtide.store.records import WritesRefused
from ebbtide.store.scripts import LuaScript, run_prefix, script
from ebbtide.types.run import LeaseRef


class TermSuperseded(Draining):
    """Another coordinator has taken over the store, which now refuses this one's writes: it must end."""

    def __init__(self) -> None:
        super().__init__("another coordinator has taken over this store; this one must stop")


class StoreRefused(Exception):
    """A script's refusal, with its `code` (see `lua/`) and detail. Topics turn it into an error for callers."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code} {detail}")
        self.code, self.detail = code, detail


_REFUSALS: Final = frozenset({
    "NORUN", "ENDED", "LEASE", "TAKEN", "HELD", "UNSETTLED", "LIVE", "UNRESERVED", "OLD", "QUOTA", "QUEUE", "OPEN",
    "UNKNOWN", "TRAJECTORY", "KIND", "GATEWAYS", "SESSION", "OVER", "TURNS", "ROLLOUT", "COUNTED",
    "KNOWN",
})  # fmt: skip
_REMEDIES: Final = {
    "OOM": "is full (maxmemory); raise maxmemory, or let trainers commit and acknowledge so that it empties",
    "MISCONF": "cannot write to its disk; free disk space or mend the volume of its append-only file",
    "READONLY": "is a read-only replica; point the coordinator at the primary",
    "NOAUTH": "needs another user or password; correct them in the store URL",
    "NOPERM": "refuses a command to the user in the store URL; allow this user all commands on keys ebbtide:*",
    "LOADING": "is still loading its data and answers afterwards",
    "BUSY": "is busy with a script and answers afterwards",
    "MASTERDOWN": "has lost its primary",
    "CLUSTERDOWN": "is a cluster that is down",
    "NOREPLICAS": "has fewer replicas than its min-replicas-to-write; start them",
}
#: Redis checks these before a script's first write, so such a script did nothing.
_UNDONE: Final = ("OOM", "MISCONF", "NOREPLICAS")
#: The client library has classes for some codes, and strips these codes from replies.
_CLASSES: Final = (
    (redis.exceptions.OutOfMemoryError, "OOM"),
    (redis.exceptions.ReadOnlyError, "READONLY"),
    (redis.exceptions.NoPermissionError, "NOPERM"),
    (redis.exceptions.AuthenticationError, "NOAUTH"),
    (redis.exceptions.BusyLoadingError, "LOADING"),
    (redis.exceptions.MasterDownError, "MASTERDOWN"),
    (redis.exceptions.ClusterDownError, "CLUSTERDOWN"),
)
#: While it connects, the client library keeps only the text.
_PHRASES: Final = (
    ("Authentication required", "NOAUTH"),
    ("invalid username-password", "NOAUTH"),
    ("loading the dataset", "LOADING"),
)
#: Codes of a server that is no longer or not yet the primary: the connection must find the primary again.
_ESTRANGING: Final = ("READONLY", "MASTERDOWN", "LOADING")


def estranges(error: redis.exceptions.RedisError) -> bool:
    """Whether the error means that the link leads to the wrong server."""
    code = next((name for kind, name in _CLASSES if isinstance(error, kind)), str(error).partition(" ")[0])
    return code in _ESTRANGING or any(f"-{name} " in str(error) for name in _ESTRANGING)


def fault(error: redis.exceptions.RedisError, *, where: str) -> Exception:
    """The exception to raise for an error of the store at `where`."""
    text = str(error)
    code, _, detail = text.partition(" ")
    if code == "TERM":
        return TermSuperseded()
    if code in _REFUSALS:
        return StoreRefused(code, detail)
    code = next((name for kind, name in _CLASSES if isinstance(error, kind)), code)
    code = next((name for phrase, name in _PHRASES if phrase in text), code)
    for name, remedy in _REMEDIES.items():
        if code == name or f"-{name} " in text:  # the latter is raised inside a script
            kind = WritesRefused if name in _UNDONE else StoreUnavailable
            return kind(f"the store at {where} {remedy}")
    if isinstance(error, redis.exceptions.ResponseError):
        return Internal(f"the store at {where} refused a command: {text[:200]}")
    return StoreUnavailable(f"the store at {where} does not answer ({text[:200]}); start it, or correct the store URL")


Argument = bytes | str | int | float
#: Pauses between attempts to connect; a local store is back within the first.
_BACKOFF_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
#: A store that is silent for so long is given up, and dialled again.
_SILENCE_S: Final = 10.0
#: Commands gather for so long at most while the store is busy with earlier ones.
_GATHER_S: Final = 0.002
#: Interval of checks whether the store is silent, and whether Sentinels name another primary.
_LOOK_S: Final = 1.0
#: Longest single wait for replicas; after it they count as away, and the next wait begins.
_CONFIRM_MS: Final = 500
#: `durable` waits so long for replicas that could spare it the full wait.
_RARE_MS: Final = 200


class _LinkBroke(Exception):
    pass


class StoreConnection:
    """`await call("GET", key)`; `await run(script, prefix, ...)`. Start it with `open`, end it with `close`."""

    def __init__(self, url: str, *, patience_s: float = 3.0, replicas: int = 0, watched: bool = True) -> None:
        """`patience_s`: how long a call waits for an absent store before it raises `StoreUnavailable`. `watched`: false
        for a connection that is never asked for `durability`.

        Raises `InvalidRequest` for a URL that names no Redis.
        """
        self._url, self._watched = url, watched
        self._dialer = dialer(url)
        self.where = self._dialer.where  # no password in messages
        self.sentinel = self._dialer.sentinel
        self.patience_s, self.replicas = patience_s, replicas
        self.incarnation = ""  # the store's latest incarnation; empty before the first link
        self.durability = DurabilityWatch(self)
        self._watchers: list[Callable[[], None]] = []
        self.before_wait: Callable[[], None] = _nothing  # called by `durable` before it waits
        self.superseded = asyncio.Event()  # set once another coordinator has the store
        self._up = asyncio.Event()
        self._why = f"the store at {self.where} was not reached yet"
        self._out: list[bytes] = []
        self._outgoing, self._idle = asyncio.Event(), asyncio.Event()
        self._sent: deque[asyncio.Future[Any]] = deque()
        self._held: list[tuple[asyncio.Future[Any], Any]] = []  # answered, but not yet confirmed by the replicas
        self._confirming: asyncio.Future[int] | None = None
        self._heard = 0.0  # when the store last answered, or was first asked after that
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, *, patience_s: float | None = None) -> None:
        """Connect, and wait until the store answers. Raises `StoreUnavailable` when patience ends."""
        self._tasks = [asyncio.create_task(self._keep(), name="store connection")]
        if self._watched:
            self._tasks.append(asyncio.create_task(self.durability.run(), name="store durability"))
        try:
            await self.call("PING", patience_s=patience_s)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tasks:
            await self._dialer.close()

    def another(self) -> "StoreConnection":
        """A second connection to the store, not open yet, for commands that block."""
        return StoreConnection(self._url, patience_s=self.patience_s, watched=False)

    def watch(self, came: Callable[[], None]) -> None:
        """Have `came` called whenever a link came up from now on, before any call goes on: earlier ones may be lost."""
        self._watchers.append(came)

    @property
    def durable_after_s(self) -> float:
        """How long the store may lose an acknowledged write, at least; 0: each write is durable at once."""
        return self.durability.horizon.promise.durable_after_s

    @property
    def away_s(self) -> float:
        """For how long the store has owed an answer or was out of reach; 0 if neither."""
        return time.monotonic() - self._heard if self._heard and (self._sent or not self._up.is_set()) else 0.0

    async def lost(self) -> None:
        """Wait until a task of the open connection fails, and raise its error: the store is lost for good."""
        if self._tasks:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def run(self, script: LuaScript, prefix: str, *args: Argument, patience_s: float | None = None) -> Any:
        """Run a script on the keys of `prefix`. Raises `StoreRefused`, `TermSuperseded`, `StoreUnavailable`."""
        try:
            return await self.call("EVALSHA", script.sha, 1, prefix, *args, patience_s=patience_s)
        except redis.exceptions.NoScriptError:
            return await self.call("EVAL", script.text, 1, prefix, *args, patience_s=patience_s)

    async def durable(self, incarnation: str = "") -> None:
        """Wait until all answered writes are durable (see `durability.py`). Raises `StoreUnavailable` if the store has
        a new incarnation meanwhile, which may have forgotten them, or goes away. `incarnation`: the one that answered
        the writes; by default the present one.
        """
        horizon, asked, incarnation = self.durability.horizon, time.monotonic(), incarnation or self.incarnation
        if horizon.at_once and incarnation == self.incarnation:
            return
        self.before_wait()
        self.durability.look_soon()
        replicas = horizon.replicas
        has = replicas and await self.call("WAIT", replicas, _RARE_MS, incarnation=incarnation) >= replicas
        await self.durability.until(asked, incarnation=incarnation, synced=bool(has))

    async def call(self, *command: Argument, patience_s: float | None = None, incarnation: str = "") -> Any:
        """Send one command, again after each broken link, and return its reply. `incarnation`: the one that the caller
        relies on; by default the present one. Raises `StoreUnavailable` when patience ends, or in another incarnation.
        """
        packed, incarnation = hiredis.pack_command(cast("tuple[bytes]", command)), incarnation or self.incarnation
        try:
            async with asyncio.timeout(self.patience_s if patience_s is None else patience_s):
                while True:
                    await self._up.wait()
                    incarnation = incarnation or self.incarnation
                    if incarnation != self.incarnation:
                        raise StoreUnavailable(f"the store at {self.where} came back and may know less; ask again")
                    try:
                        return await self._send(packed)
                    except _LinkBroke:
                        continue
        except TimeoutError:
            raise StoreUnavailable(self._excuse()) from None

    def _excuse(self) -> str:
        if not self._up.is_set():
            return self._why
        if self._confirming is not None:
            return f"fewer than {self.replicas} replicas of the store at {self.where} confirm its writes; start them"
        return f"the store at {self.where} is connected but does not answer in time"

    async def _send(self, packed: bytes) -> Any:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._put(packed, reply)
        try:
            return await reply
        except redis.exceptions.NoScriptError:
            raise
        except redis.exceptions.RedisError as error:
            raise self._fault(error) from None
        finally:
            del reply  # it holds the error, which refers to this frame: together they would be a cycle

    def _fault(self, error: redis.exceptions.RedisError) -> Exception:
        found = fault(error, where=self.where)
        if isinstance(found, TermSuperseded):
            self.superseded.set()
        return found

    def _put(self, packed: bytes, reply: asyncio.Future[Any]) -> None:
        if not self._sent:
            self._heard = time.monotonic()
        self._out.append(packed)
        self._sent.append(reply)
        self._outgoing.set()

    async def _keep(self) -> None:
        failures = 0
        while True:
            link: AbstractConnection | None = None
            try:
                link = await self._dialer.dial()
                self.incarnation = await greet(link)
                failures = 0
                await self._serve(link)
            except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
                self._why = str(_reason(error, self.where))
            finally:
                self._break()
                if link is not None:
                    await link.disconnect(nowait=True)
            await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
            failures += 1

    async def _serve(self, link: AbstractConnection) -> None:
        """Use the link until it breaks, and raise the reason."""
        self._up.set()
        self.durability.began()
        for came in self._watchers:
            came()
        tasks = [asyncio.create_task(work) for work in (self._write(link), self._read(link), self._watch())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, link: AbstractConnection) -> None:
        while True:
            await self._outgoing.wait()
            if len(self._sent) > len(self._out):
                await self._gather()
            self._outgoing.clear()
            batch, self._out = self._out, []
            if not batch:  # its commands ended with the last link
                continue
            await _write(link, b"".join(batch))
            if self.replicas:
                await self._confirm(link)

    async def _gather(self) -> None:
        """Let commands gather while earlier ones are unanswered: the store then wakes and fsyncs once for all of them,
        and both cost it more than a small script.
        """
        self._idle.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_GATHER_S):
                await self._idle.wait()

    async def _confirm(self, link: AbstractConnection) -> None:
        """Wait until replicas confirm one batch, then release its replies. The next batch gathers meanwhile."""
        wait = hiredis.pack_command(cast("tuple[bytes]", ("WAIT", self.replicas, _CONFIRM_MS)))
        confirmed = 0
        while confirmed < self.replicas:
            self._confirming = asyncio.get_running_loop().create_future()
            # After the batch just written, before the commands still to write.
            self._sent.insert(len(self._sent) - len(self._out), self._confirming)
            await _write(link, wait)
            confirmed = await self._confirming
        self._confirming = None
        held, self._held = self._held, []
        for waiting, reply in held:
            _settle(waiting, reply)

    async def _read(self, link: AbstractConnection) -> None:
        chunks = ReplyChunks(link)
        while True:
            for reply in await chunks.next():
                if isinstance(reply, redis.exceptions.RedisError) and _breaks(reply):
                    raise reply
                self._answer(reply)

    async def _watch(self) -> None:
        """Break a link whose store is silent or no longer the primary. Otherwise a half-open connection would block its
        callers for ever, and a primary that was cut off would take writes that are lost later.
        """
        while True:
            await asyncio.sleep(_LOOK_S)
            if await self._dialer.moved():
                raise redis.exceptions.ConnectionError("the Sentinels name another primary")
            if not self._sent:
                self._put(hiredis.pack_command(("PING",)), asyncio.get_running_loop().create_future())
            elif time.monotonic() - self._heard > _SILENCE_S:
                raise TimeoutError(f"silent for {_SILENCE_S:g} s")

    def _answer(self, reply: Any) -> None:
        self._heard = time.monotonic()
        waiting = self._sent.popleft()
        if len(self._sent) <= len(self._out):
            self._idle.set()
        if self.replicas and waiting is not self._confirming:
            self._held.append((waiting, reply))
        else:
            _settle(waiting, reply)

    def _break(self) -> None:
        self._up.clear()
        self._out.clear()
        self._confirming = None
        broken = [*(waiting for waiting, _ in self._held), *self._sent]
        self._held.clear()
        self._sent.clear()
        for waiting in broken:
            _settle(waiting, _LinkBroke())
            waiting.exception() if waiting.done() and not waiting.cancelled() else None


async def _write(link: AbstractConnection, packed: bytes) -> None:
    try:
        await link.send_packed_command(packed, check_health=False)
    except RuntimeError as error:  # uvloop raises it for a transport that just closed
        raise ConnectionError(str(error)) from error


def _breaks(error: redis.exceptions.RedisError) -> bool:
    """Whether the server cannot be used any more, instead of having refused one command."""
    return not isinstance(error, redis.exceptions.ResponseError) or estranges(error)


def _nothing() -> None: ...


def _settle(waiting: asyncio.Future[Any], reply: Any) -> None:
    if waiting.done():  # its caller was cancelled
        return
    if isinstance(reply, Exception):
        waiting.set_exception(reply)
    else:
        waiting.set_result(reply)


def _reason(error: Exception, where: str) -> Exception:
    if isinstance(error, redis.exceptions.RedisError):
        return fault(error, where=where)
    return StoreUnavailable(f"the store at {where} does not answer ({error}); start it, or correct the store URL")


class Topic:
    """Base of the topics. Calls raise `StoreUnavailable`, `TermSuperseded`, `NotFound` (the run), `LeaseSuperseded`.

    `quarantined_runs`: live runs that this term could not take over or read, shared by the topics of one store. Nothing
    is written to them, nor deleted. Their fences may have a former term: then a write would seem to come from a
    superseded coordinator.
    """

    def __init__(self, link: StoreConnection, term: str, quarantined_runs: set[str] | None = None) -> None:
        self._link = link
        self._term = term
        self._quarantined_runs: Final = set[str]() if quarantined_runs is None else quarantined_runs

    async def _write(self, name: str, run_id: str, *args: Argument) -> Any:
        """Run a script that checks the term."""
        self._check_taken(run_id)
        return await self._run(name, run_id, self._term, *args)

    async def _leased(self, name: str, lease: LeaseRef, *args: Argument) -> Any:
        """Run a script that checks the term and the lease."""
        self._check_taken(lease.run_id)
        return await self._run(name, lease.run_id, self._term, lease.role, lease.fence, *args)

    def _check_taken(self, run_id: str) -> None:
        if run_id in self._quarantined_runs:
            raise Internal(f"run {run_id} has unexpected data in the store and is left alone; mend its keys")

    async def _run(self, name: str, run_id: str, *args: Argument) -> Any:
        try:
            return await self._link.run(script(name), run_prefix(run_id), *args)
        except StoreRefused as refused:
            raise _common(refused, run_id) or refused from None


def _common(refused: StoreRefused, run_id: str) -> EbbtideError | None:
    match refused.code:
        case "NORUN":
            return no_run(run_id)
        case "ENDED":
            return LeaseSuperseded(f"run {run_id} has ended ({refused.detail.lower()}); step down")
        case "LEASE":
            return LeaseSuperseded(f"the lease on run {run_id} was claimed by another holder; step down")
    return None


def no_run(run_id: str) -> NotFound:
    return NotFound(f"there is no run {run_id}; it was never submitted here, or its record has expired")
