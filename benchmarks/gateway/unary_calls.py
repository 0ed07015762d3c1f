"""Times calls that are answered in one piece, each kind on a connection of its own, one call after another."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.control_plane.measures import percentile
from benchmarks.gateway.lean_http import Connection, request
from benchmarks.gateway.stream_plan import SHORT

#: From the end of a call to the next one of its kind.
_PAUSE_S: Final = 0.02
Times = dict[str, list[float]]


def unary_requests(run_id: str, key: str) -> dict[str, bytes]:
    """By kind. `models` reads the coordinator at most twice a second, so its calls wait for their turn."""
    prompt = {"model": run_id, "prompt": "Look for the number, and say what it is."}
    return {
        "models": request("GET", "/v1/models", key),
        "tokenize": request("POST", "/tokenize", key, prompt),
        "completion": request("POST", "/v1/completions", key, prompt | {"max_tokens": SHORT // 2}),
    }


async def unary_times(address: str, run_id: str, key: str, seconds: float) -> Times:
    """The seconds that each call took, by kind. Raises `RuntimeError` for one that is refused."""
    end = time.monotonic() + seconds
    sent = unary_requests(run_id, key)
    found = await asyncio.gather(*(_asked(address, one, end) for one in sent.values()))
    return dict(zip(sent, found, strict=True))


async def _asked(address: str, sent: bytes, end: float) -> list[float]:
    connection, took = await Connection.open(address), list[float]()
    try:
        while time.monotonic() < end:
            answer = await connection.ask(sent)
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {answer.body[:500]!r}")
            took.append(answer.seconds)
            await asyncio.sleep(_PAUSE_S)
    finally:
        connection.close()
    return took


def joined(blocks: Sequence[Times]) -> Times:
    """The times of all blocks, by kind."""
    return {kind: [one for block in blocks for one in block[kind]] for kind in blocks[0]}


def unary_figures(few: Times, many: Times) -> dict[str, dict[str, Any]]:
    """By kind: p50 and p99 of both, in milliseconds, and how many times longer those of `many` are."""
    return {kind: _compared(few[kind], many[kind]) for kind in few}


def _compared(few: Sequence[float], many: Sequence[float]) -> dict[str, Any]:
    found: dict[str, Any] = {"calls": [len(few), len(many)]}
    for share in (0.5, 0.99):
        name = f"p{share * 100:.0f}"
        both = percentile(few, share), percentile(many, share)
        found |= {f"{name}_ms": [round(one * 1e3, 2) for one in both], f"{name}_over": round(both[1] / both[0], 3)}
    return found


def worst(figures: Mapping[str, Mapping[str, Any]], name: str) -> float:
    """The largest of one figure over all kinds."""
    return max(float(one[name]) for one in figures.values())
