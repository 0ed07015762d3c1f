"""The users: a process of its own that sends a plan's requests when they are due, and notes when their tokens came.

    python -m benchmarks.pair.client --url URL --model NAME --plan PLAN.json --out ANSWERS.json [--seed N]

Open loop: nobody waits for anybody's answer. Prompts are random token ids, so that none is found in a prefix cache.
Times are of the monotonic clock, which all processes of the host share.
"""

import argparse
import asyncio
import time
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from benchmarks.pair.traffic import Request

_LEAST_ID, _MOST_ID = 3, 900


class Plan(Struct, frozen=True, kw_only=True):
    """`starts`: when second 0 of the requests is, by the monotonic clock."""

    starts: float
    requests: list[Request]


class Answer(Struct, kw_only=True):
    """Of one request: when it was due, sent, and its first and last tokens came (0: never); why it failed."""

    due: float
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    prompt: int
    output: int
    failed: str = ""

    @property
    def ttft_s(self) -> float:
        return self.first - self.sent

    @property
    def tpot_s(self) -> float:
        return (self.last - self.first) / (self.output - 1)


async def send(
    session: aiohttp.ClientSession, url: str, model: str, prompt: list[int], output: int
) -> tuple[float, float]:
    """One completion, streamed. When its first and last events came. Raises what keeps it from coming whole."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    first = last = 0.0
    done = False
    async with session.post(f"{url}/v1/completions", json=body) as response:
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


async def replay(url: str, model: str, plan: Plan, seed: int) -> list[Answer]:
    """Send all of `plan`; what failed says so."""
    random = Random(seed)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=600)
    ) as session:

        async def one(request: Request, prompt: list[int]) -> Answer:
            answer = Answer(due=plan.starts + request.at, prompt=request.prompt, output=request.output)
            await asyncio.sleep(answer.due - time.monotonic())
            answer.sent = time.monotonic()
            try:
                answer.first, answer.last = await send(session, url, model, prompt, request.output)
            except (aiohttp.ClientError, EOFError, TimeoutError, OSError) as error:
                answer.failed = f"{type(error).__name__}: {error}"
            return answer

        prompts = [[random.randrange(_LEAST_ID, _MOST_ID) for _ in range(one.prompt)] for one in plan.requests]
        return await asyncio.gather(*map(one, plan.requests, prompts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("url", "model", "plan", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--seed", type=int, default=0)
    given: Any = parser.parse_args()
    plan = msgspec.json.decode(Path(given.plan).read_bytes(), type=Plan)
    answers = asyncio.run(replay(given.url, given.model, plan, given.seed))
    Path(given.out).write_bytes(msgspec.json.encode(answers))


if __name__ == "__main__":
    main()
