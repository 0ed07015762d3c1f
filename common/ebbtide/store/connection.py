"""One pipelined connection to Redis, which comes back by itself.

Invariant: commands go out in the order of `call`, and replies come back in that order, so `_sent` pairs them. When
the link breaks, all of `_sent` ends as broken and each caller sends again on the next link, so everything sent here
must be safe to repeat: reads, and scripts that are fenced. Nothing here outlives the process; what a broken link had
sent may or may not have been done.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, cast

import hiredis
import redis.exceptions
from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from ebbtide.errors import InvalidRequest, StoreUnavailable
from ebbtide.store.faults import TermSuperseded, fault
from ebbtide.store.scripts import Script

Argument = bytes | str | int | float
#: Between attempts to connect; a local store is back within the first.
_BACKOFF_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
#: A store that answers nothing for so long is given up, and reached anew.
_SILENCE_S: Final = 10.0


class _LinkBroke(Exception):
    pass


class Connection:
    """`await call("GET", key)`; `await run(script, prefix, ...)`. Start it with `open`, end it with `close`."""

    def __init__(self, url: str, *, patience_s: float = 3.0) -> None:
        """`patience_s`: how long a call waits for a store that is away before it raises `StoreUnavailable`.

        Raises `InvalidRequest` for a URL that names no Redis.
        """
        self.where = url.rpartition("@")[2] if "@" in url else url  # no password in messages
        self.patience_s = patience_s
        self.on_link: Callable[[], None] = lambda: None  # called when a link came up: earlier calls may have been lost
        self.superseded = asyncio.Event()  # set when the store belongs to another coordinator
        try:
            self._pool = ConnectionPool.from_url(
                url, protocol=2, socket_timeout=None, socket_connect_timeout=5, retry=Retry(NoBackoff(), 0)
            )
        except ValueError as error:
            raise InvalidRequest(f"{self.where!r} cannot be used: {error}", field="store_url") from None
        self._up = asyncio.Event()
        self._why = f"the store at {self.where} was not reached yet"
        self._out: list[bytes] = []
        self._outgoing = asyncio.Event()
        self._sent: deque[asyncio.Future[Any]] = deque()
        self._keeper: asyncio.Task[None] | None = None

    async def open(self, *, patience_s: float | None = None) -> None:
        """Begin to connect, and wait until the store answers. Raises `StoreUnavailable` when patience ends."""
        self._keeper = asyncio.create_task(self._keep(), name="store connection")
        try:
            await self.call("PING", patience_s=patience_s)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None

    async def lost(self) -> None:
        """Wait, once open, until what keeps the connection fails, and raise why: the store is out of reach for good."""
        if self._keeper is not None:
            await asyncio.shield(self._keeper)

    async def run(self, script: Script, prefix: str, *args: Argument, patience_s: float | None = None) -> Any:
        """Run a script on the run whose keys begin with `prefix`. Raises `Refused`, `TermSuperseded`,
        `StoreUnavailable`.
        """
        try:
            return await self.call("EVALSHA", script.sha, 1, prefix, *args, patience_s=patience_s)
        except redis.exceptions.NoScriptError:
            return await self.call("EVAL", script.text, 1, prefix, *args, patience_s=patience_s)

    async def call(self, *command: Argument, patience_s: float | None = None) -> Any:
        """Send one command, again after each broken link, and return its reply. Raises `StoreUnavailable` when
        patience ends.
        """
        packed = hiredis.pack_command(cast("tuple[bytes]", command))
        try:
            async with asyncio.timeout(self.patience_s if patience_s is None else patience_s):
                while True:
                    await self._up.wait()
                    try:
                        return await self._send(packed)
                    except _LinkBroke:
                        continue
        except TimeoutError:
            if self._up.is_set():
                raise StoreUnavailable(f"the store at {self.where} is connected but does not answer in time") from None
            raise StoreUnavailable(self._why) from None

    async def _send(self, packed: bytes) -> Any:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._out.append(packed)
        self._sent.append(reply)
        self._outgoing.set()
        try:
            return await reply
        except redis.exceptions.NoScriptError:
            raise
        except redis.exceptions.RedisError as error:
            found = fault(error, where=self.where)
            if isinstance(found, TermSuperseded):
                self.superseded.set()
            raise found from None

    async def _keep(self) -> None:
        failures = 0
        while True:
            link = cast("AbstractConnection", self._pool.make_connection())  # type: ignore[no-untyped-call]
            try:
                await link.connect()  # type: ignore[no-untyped-call]
                failures = 0
                await self._serve(link)
            except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
                self._why = str(_reason(error, self.where))
            finally:
                self._break()
                await link.disconnect(nowait=True)
            await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
            failures += 1

    async def _serve(self, link: AbstractConnection) -> None:
        """Use the link until it breaks; raises what broke it."""
        self._up.set()
        self.on_link()
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
            self._outgoing.clear()
            batch, self._out = self._out, []
            if not batch:  # what was to be sent ended with the last link
                continue
            try:
                await link.send_packed_command(b"".join(batch), check_health=False)
            except RuntimeError as error:  # what uvloop raises for a transport that has just closed
                raise ConnectionError(str(error)) from error

    async def _read(self, link: AbstractConnection) -> None:
        while True:
            try:
                reply = await link.read_response(disconnect_on_error=False)
            except redis.exceptions.ResponseError as error:
                self._answer(error)
            else:
                self._answer(reply)

    async def _watch(self) -> None:
        """Break a link whose store is silent: without this, a half-open connection would hold its callers for ever."""
        while True:
            await asyncio.sleep(_SILENCE_S / 2)
            async with asyncio.timeout(_SILENCE_S):
                await self._send(hiredis.pack_command(("PING",)))

    def _answer(self, reply: Any) -> None:
        waiting = self._sent.popleft()
        if waiting.done():  # its caller went away
            return
        if isinstance(reply, Exception):
            waiting.set_exception(reply)
        else:
            waiting.set_result(reply)

    def _break(self) -> None:
        self._up.clear()
        self._out.clear()
        sent, self._sent = self._sent, deque()
        for waiting in sent:
            if not waiting.done():
                waiting.set_exception(_LinkBroke())


def _reason(error: Exception, where: str) -> Exception:
    if isinstance(error, redis.exceptions.RedisError):
        return fault(error, where=where)
    return StoreUnavailable(f"the store at {where} does not answer ({error}); start it, or mend the store URL")
