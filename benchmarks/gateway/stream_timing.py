"""Times streamed completions as a client sees them."""

import time
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import openai
from msgspec import Struct

from benchmarks.control_plane.measures import percentile
from benchmarks.gateway.gateway_plan import TOKENS_IN, TOKENS_OUT


class StreamTiming(Struct, frozen=True):
    """Seconds. `tpot_s`: mean time per token behind the first chunk's; `gap_s`: the longest between two chunks."""

    ttft_s: float
    tpot_s: float
    gap_s: float


async def timed_stream(client: openai.AsyncOpenAI, model: str, random: Random, vocabulary: int) -> StreamTiming:
    """One completion of `TOKENS_OUT` tokens behind a prompt of `TOKENS_IN` that nobody sent before."""
    prompt = [random.randrange(3, vocabulary - 1) for _ in range(TOKENS_IN)]
    began, times, counts = time.perf_counter(), list[float](), list[int]()
    body = {"ignore_eos": True, "return_token_ids": True}
    stream: Any = await client.completions.create(
        model=model, prompt=prompt, max_tokens=TOKENS_OUT, temperature=0, stream=True, extra_body=body
    )
    async for chunk in stream:
        if chunk.choices and (ids := chunk.choices[0].token_ids):
            times.append(time.perf_counter())
            counts.append(len(ids))
    if sum(counts) != TOKENS_OUT:
        raise RuntimeError(f"{sum(counts)} tokens were streamed, and {TOKENS_OUT} asked for")
    gaps = [later - earlier for earlier, later in pairwise(times)]
    rest = sum(counts[1:])
    return StreamTiming(times[0] - began, (times[-1] - times[0]) / rest if rest else 0.0, max(gaps, default=0.0))


def block_figures(timings: Sequence[StreamTiming]) -> dict[str, float]:
    """Of one block, in milliseconds."""
    first = [one.ttft_s * 1e3 for one in timings]
    return {
        "ttft_p50_ms": percentile(first, 0.5),
        "ttft_p99_ms": percentile(first, 0.99),
        "tpot_ms": sum(one.tpot_s for one in timings) / len(timings) * 1e3,
        "gap_p99_ms": percentile([one.gap_s * 1e3 for one in timings], 0.99),
    }
