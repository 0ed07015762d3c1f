"""Plays the users: sends a plan's requests when they are due, and records when their tokens came.

    python -m ebbtide.demo.coserving.coserving_client --url URL --model NAME --plan PLAN.json --out ANSWERS.json
    [--seed N]

Open loop: no request waits for another's answer. Prompts are random token ids, which no prefix cache holds. Times are
of the monotonic clock, which all processes of the host share. After SIGTERM the client sends nothing more, waits for
open requests, and writes the answers. The file of answers appears as a whole.
"""

import argparse
import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, Final

import aiohttp
import msgspec
from msgspec import Struct

from ebbtide.demo.coserving.coserving_records import ServedAnswer
from ebbtide.demo.coserving.request_traffic import TrafficRequest
from ebbtide.runtime import write_atomically

#: Token ids of prompts, in any vocabulary; none ends a text.
_IDS: Final = [str(number) for number in range(3, 900)]
#: A request that takes longer has failed.
_PATIENCE_S: Final = 600.0
#: Delay of the first request if the plan names no time.
_MOMENT_S: Final = 0.2


class TrafficPlan(Struct, frozen=True, kw_only=True):
    requests: list[TrafficRequest]
    starts: float = 0.0  # second 0 of the requests, by the monotonic clock; 0: once the client is ready


def body(model: str, request: TrafficRequest, random: Random) -> bytes:
    """Encodes a streamed completion that ends after exactly the tokens wanted."""
    options = {
        "model": model,
        "max_tokens": request.output,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
        "prompt": msgspec.Raw(f"[{','.join(random.choices(_IDS, k=request.prompt))}]".encode()),
    }
    return msgspec.json.encode(options)


async def send(session: aiohttp.ClientSession, url: str, content: bytes) -> tuple[float, float]:
    """Sends a completion. Returns when its first and last events came. Raises if it does not come whole."""
    first = last = 0.0
    done = False
    headers = {"content-type": "application/json"}
    async with session.post(f"{url}/v1/completions", data=content, headers=headers) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                done = True
            elif line.startswith(b"data: "):
                last = time.monotonic()
                first = first or last
    if not done or not first:
        raise EOFError("the stream ended early")
    return first, last


async def replay(
    url: str, model: str, plan: TrafficPlan, seed: int = 0, stop: asyncio.Event | None = None
) -> list[ServedAnswer]:
    """Sends all of `plan`, or until `stop` is set. Failed answers say why."""
    random, stop = Random(seed), stop or asyncio.Event()
    bodies = [body(model, request, random) for request in plan.requests]
    starts = plan.starts or time.monotonic() + _MOMENT_S
    async with open_session() as session:

        async def one(request: TrafficRequest, content: bytes) -> ServedAnswer | None:
            due = starts + request.at
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), max(0.0, due - time.monotonic()))
            return None if stop.is_set() else await answer(session, url, request, content, due)

        found = await asyncio.gather(*map(one, plan.requests, bodies))
    return [answered for answered in found if answered is not None]


async def answer(
    session: aiohttp.ClientSession, url: str, request: TrafficRequest, content: bytes, due: float
) -> ServedAnswer:
    """Sends one request now."""
    sent, first, last, failed = time.monotonic(), 0.0, 0.0, ""
    try:
        first, last = await send(session, url, content)
    except (aiohttp.ClientError, EOFError, TimeoutError, OSError) as error:
        failed = f"{type(error).__name__}: {error}"
    return ServedAnswer(
        due=due, sent=sent, first=first, last=last, prompt=request.prompt, output=request.output, failed=failed
    )


@asynccontextmanager
async def open_session() -> AsyncIterator[aiohttp.ClientSession]:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=_PATIENCE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session


async def _until_told(given: Any, plan: TrafficPlan) -> list[ServedAnswer]:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    return await replay(given.url, given.model, plan, given.seed, stop)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("url", "model", "plan", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    plan = msgspec.json.decode(Path(given.plan).read_bytes(), type=TrafficPlan)
    answers = asyncio.run(_until_told(given, plan))
    write_atomically(Path(given.out), msgspec.json.encode(answers).decode())


if __name__ == "__main__":
    main()
