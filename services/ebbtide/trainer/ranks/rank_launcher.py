"""Starts the ranks of `ebbtide serve trainer --ranks N` on this host and ends them together, without torch.

A rank learns its place from the environment variables of torchrun, which the launcher sets alike.

Invariant: no rank is left when `launch` returns; if it dies, the kernel kills them. The error names the first rank that
failed, with its last lines.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.runtime import Shutdown
from ebbtide.telemetry import get_logger
from ebbtide.trainer.settings import TrainerSettings

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Descriptor of a listening loopback socket for rank 0's store; torch's own socket listens on all addresses.
LISTENING = "EBBTIDE_RANKS_LISTENING"


class RankLost(EbbtideError):
    """Another rank of this trainer is gone or silent. All ranks end, and the next trainer resumes the run."""


class RankPlace(Struct, frozen=True, kw_only=True):
    rank: int
    size: int
    local_rank: int  # on this host
    listening: int | None = None  # rank 0's socket, if given


def place_of(environ: Mapping[str, str], ranks: int) -> RankPlace | None:
    """Returns this process's place, if the environment gives one; `ranks` is the setting (1: none).

    Raises `InvalidRequest` naming the variable, or the contradicting setting.
    """
    if "WORLD_SIZE" not in environ or "RANK" not in environ:
        return None
    if missing := [name for name in _NAMES if not environ.get(name)]:
        raise InvalidRequest(
            "is missing, where RANK and WORLD_SIZE are set; start the ranks by torchrun", field=missing[0]
        )
    size = _number(environ, "WORLD_SIZE", 1)
    place = RankPlace(
        rank=_number(environ, "RANK", 0),
        size=size,
        local_rank=_number(environ, "LOCAL_RANK", 0) if "LOCAL_RANK" in environ else 0,
        listening=_number(environ, LISTENING, 0) if LISTENING in environ else None,
    )
    if place.rank >= size:
        raise InvalidRequest(f"is {place.rank}, but must be below {size}", field="RANK")
    if ranks not in (1, size):
        raise InvalidRequest(f"is {ranks}, but the environment's WORLD_SIZE is {size}; give only one", field="ranks")
    return place if size > 1 else None


def _number(environ: Mapping[str, str], name: str, least: int) -> int:
    try:
        number = int(environ[name])
    except ValueError:
        raise InvalidRequest(f"must be a number, not {environ[name]!r}", field=name) from None
    if number < least:
        raise InvalidRequest(f"must be at least {least}", field=name)
    return number


log = get_logger(__name__)

#: Time after a failure for the other ranks to notice, and for rank 0 to give its lease back.
_GRACE_S: Final = 6.0
#: Time after the end of rank 0 for the others to end.
_PART_S: Final = 20.0
#: Last lines of a rank that are shown if it fails.
_LINES: Final = 5


class _Rank:
    def __init__(self, number: int, process: asyncio.subprocess.Process) -> None:
        self.number, self.process = number, process
        self.tail: deque[str] = deque(maxlen=_LINES)
        self._reading = asyncio.create_task(self._read())
        self.ended = asyncio.create_task(self._wait())

    async def _read(self) -> None:
        """Copies the rank's log to this process's."""
        stream = self.process.stderr
        while stream is not None and (line := await _line(stream)):
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            self.tail.append(line.decode(errors="replace").rstrip()[-1000:])

    async def _wait(self) -> int:
        status = await self.process.wait()
        await asyncio.wait({self._reading}, timeout=1.0)  # what it started may hold the pipe open
        return status

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


async def _line(stream: asyncio.StreamReader) -> bytes:
    """Returns the next line, a piece of a line beyond the stream's limit, or nothing at the end."""
    try:
        return await stream.readuntil()
    except asyncio.IncompleteReadError as end:
        return end.partial
    except asyncio.LimitOverrunError as long:
        return await stream.readexactly(long.consumed)


async def launch(settings: TrainerSettings, argv: Sequence[str], shutdown: Shutdown) -> None:
    """Runs the ranks until the trainer ends or is asked to. Raises `RankLost` if one failed."""
    ranks: list[_Rank] = []
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=2048) as meeting:  # rank 0 has it from here on
            for number in range(settings.ranks):
                ranks.append(_Rank(number, await _start(number, settings.ranks, meeting, argv)))  # noqa: PERF401
        await _until_the_end(ranks, shutdown)
    finally:
        for rank in ranks:
            rank.signal(signal.SIGKILL)
        await asyncio.gather(*(rank.ended for rank in ranks), return_exceptions=True)


async def _until_the_end(ranks: list[_Rank], shutdown: Shutdown) -> None:
    asked = asyncio.create_task(shutdown.requested.wait())
    endings = {rank.ended for rank in ranks}
    failed: _Rank | None = None
    while failed is None and not all(rank.ended.done() for rank in ranks):
        patience_s = _PART_S if ranks[0].ended.done() else None
        waiting = {ended for ended in endings if not ended.done()}
        done, _ = await asyncio.wait({asked, *waiting}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if asked in done:
            ranks[0].signal(signal.SIGTERM)  # the others hear it from rank 0
            await _heard(ranks)
            await asyncio.wait(endings, timeout=_PART_S)
            return
        failed = _at_fault(ranks, overdue=not done)
    asked.cancel()
    if failed is not None:
        await asyncio.wait(endings, timeout=_GRACE_S)
        raise RankLost(_story(failed, len(ranks)))


async def _heard(ranks: list[_Rank]) -> None:
    """Returns when rank 0 has ended, after its step; or when another failed, as rank 0 may be frozen."""
    while not ranks[0].ended.done() and not any(rank.ended.done() and rank.ended.result() for rank in ranks):
        await asyncio.wait({rank.ended for rank in ranks if not rank.ended.done()}, return_when=asyncio.FIRST_COMPLETED)


def _at_fault(ranks: list[_Rank], *, overdue: bool) -> _Rank | None:
    """Returns the failed rank, preferably a killed one, which made the others end; or one that is `overdue`."""
    failed = [rank for rank in ranks if rank.ended.done() and rank.ended.result()]
    late = [rank for rank in ranks if overdue and not rank.ended.done()]
    return min(failed, key=lambda rank: rank.ended.result() >= 0, default=None) or next(iter(late), None)


def _story(rank: _Rank, size: int) -> str:
    if not rank.ended.done():
        what = "did not end"
    elif (status := rank.ended.result()) < 0:
        what = f"was killed by {signal.Signals(-status).name}"
    else:
        what = f"ended with status {status}"
    said = "\n  ".join(rank.tail) or "nothing"
    return f"rank {rank.number} of {size} {what}, so all ranks end; it said last:\n  {said}"


async def _start(number: int, size: int, meeting: socket.socket, argv: Sequence[str]) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "ebbtide.trainer", *argv, "--die-with-parent", str(os.getpid())]
    environment = _environment(number, size, meeting.getsockname()[1])
    given = () if number else (meeting.fileno(),)
    if given:
        environment[LISTENING] = str(given[0])
    return await asyncio.create_subprocess_exec(
        *command, env=environment, stderr=asyncio.subprocess.PIPE, start_new_session=True, pass_fds=given
    )


def _environment(number: int, size: int, port: int) -> dict[str, str]:
    """Sets torchrun's variables; on one host the ranks talk only over loopback."""
    threads = str(max(1, (os.cpu_count() or 1) // size))
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "MASTER_PORT": port}
    loopback = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return {"OMP_NUM_THREADS": threads} | os.environ | loopback | {name: str(value) for name, value in place.items()}
