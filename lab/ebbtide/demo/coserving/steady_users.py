"""Plays users who never leave: sends made-up requests to a served model, and says every so often how it was served.

    python -m ebbtide.demo.coserving.steady_users --url URL --model NAME [--seed N] [--every-s 15] [--out USERS.json]

Open loop, in bursts, as `coserving_client` sends a plan. A request whose answer does not come whole is sent again until
one does, as clients do whose server is started again; one that the server refuses (4xx) ends the program. While 64
requests are open no more are sent, so users do not pile up before a server that is away. The account is printed as a
line of JSON, and `--out` always has the newest one. After SIGTERM nothing more is sent, open
requests end, and the last account is printed.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Final

import aiohttp
import msgspec
from msgspec import Struct

from ebbtide.demo.coserving.coserving_client import body, open_session, send
from ebbtide.demo.coserving.coserving_records import ServedAnswer, percentile, tpots, ttfts
from ebbtide.demo.coserving.request_traffic import TrafficBursts, TrafficRequest, made_up
from ebbtide.errors import InvalidRequest
from ebbtide.rpc.backoff import pauses
from ebbtide.runtime import write_atomically

#: Traffic is made up for so long at once.
_LAP_S: Final = 60.0
#: Latencies are those of so many newest answers.
_REMEMBERED: Final = 500
#: Requests that may be open; those that come then find the house full, and leave unsent.
MOST_OPEN: Final = 64
#: Refusals that pass: the server was slow, or has too much to do.
_PASSING: Final = {408, 429}


class UsersAccount(Struct, frozen=True, kw_only=True):
    """Every request is sent, and ends once, however often it was sent again."""

    sent: int = 0
    ended: int = 0  # with a whole answer
    skipped: int = 0  # requests that were due while as many as may be were open, and were not sent
    again: int = 0  # times that a request was sent again, because no whole answer came
    ttft_p50_ms: float = 0.0
    ttft_p99_ms: float = 0.0
    tpot_p50_ms: float = 0.0
    tpot_p99_ms: float = 0.0


class SteadyUsers:
    """`bursts` of requests for `model` go to `url`, from `run` on."""

    def __init__(self, url: str, model: str, *, seed: int = 0, bursts: TrafficBursts | None = None) -> None:
        self._url, self._model, self._seed, self._bursts = url, model, seed, bursts or TrafficBursts()
        self._sent = self._ended = self._skipped = self._again = 0
        self._newest: deque[ServedAnswer] = deque(maxlen=_REMEMBERED)

    def account(self) -> UsersAccount:
        ttft, tpot = ttfts(self._newest), tpots(self._newest)
        return UsersAccount(
            sent=self._sent,
            ended=self._ended,
            skipped=self._skipped,
            again=self._again,
            ttft_p50_ms=1e3 * percentile(ttft, 0.5),
            ttft_p99_ms=1e3 * percentile(ttft),
            tpot_p50_ms=1e3 * percentile(tpot, 0.5),
            tpot_p99_ms=1e3 * percentile(tpot),
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Returns when `stop` is set and all that was sent has ended. Raises `InvalidRequest` for a refused request."""
        try:
            async with open_session() as users, asyncio.TaskGroup() as open_requests:
                await self._send(users, open_requests, stop)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _send(self, users: aiohttp.ClientSession, open_requests: asyncio.TaskGroup, stop: asyncio.Event) -> None:
        began, random = time.monotonic(), Random(self._seed)
        for request in self._without_end():
            due = began + request.at
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), max(0.0, due - time.monotonic()))
            if stop.is_set():
                return
            if self._sent - self._ended < MOST_OPEN:
                self._sent += 1
                open_requests.create_task(self._serve(users, request, body(self._model, request, random), due))
            else:
                self._skipped += 1

    def _without_end(self) -> Iterator[TrafficRequest]:
        for lap in count():
            for request in made_up(self._bursts, _LAP_S, self._seed + lap):
                yield TrafficRequest(lap * _LAP_S + request.at, request.prompt, request.output)

    async def _serve(self, users: aiohttp.ClientSession, request: TrafficRequest, content: bytes, due: float) -> None:
        for pause in pauses(0.1, 2.0):
            sent = time.monotonic()
            try:
                first, last = await send(users, self._url, content)
                break
            except (aiohttp.ClientError, EOFError, TimeoutError, OSError) as error:
                if isinstance(error, aiohttp.ClientResponseError) and _is_final(error.status):
                    text = f"{self._url} refused a request: {error.status} {error.message}"
                    raise InvalidRequest(text, field="--url") from None
            self._again += 1
            await asyncio.sleep(pause)
        self._ended += 1
        found = ServedAnswer(due=due, sent=sent, first=first, last=last, prompt=request.prompt, output=request.output)
        self._newest.append(found)


def _is_final(status: int) -> bool:
    """Whether the same request would be refused again."""
    return 400 <= status < 500 and status not in _PASSING


async def play(users: SteadyUsers, every_s: float, tell: Callable[[UsersAccount], None]) -> None:
    """Runs `users` until SIGTERM, and tells of them at once, every `every_s` seconds and in the end."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    running = asyncio.create_task(users.run(stop))
    tell(users.account())
    while not running.done():
        await asyncio.wait({running}, timeout=every_s)
        tell(users.account())
    running.result()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("url", "model"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every-s", type=float, default=15.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(argv)

    def tell(account: UsersAccount) -> None:
        line = msgspec.json.encode(account).decode()
        print(line, flush=True)  # noqa: T201 - this is a command
        if given.out is not None:
            write_atomically(given.out, line)

    try:
        asyncio.run(play(SteadyUsers(given.url, given.model, seed=given.seed), given.every_s, tell))
    except InvalidRequest as error:
        sys.exit(f"steady_users: {error}")


if __name__ == "__main__":
    main()
