"""A process of clients that read streams, told what to do by JSON lines on stdin, one answer a line on stdout.

{"do": "open", "keys": ["..."], "streams": 512}  so many streams of each key more; answers when each has tokens, or was
                                                 refused
{"do": "measure"}                                what was seen since the last measure
{"do": "close", "keep": 64}                      all but the first so many leave
{"do": "greedy", "key": "...", "requests": 8, "completions": 128, "tokens": 32}
                                                 so many requests at once, again and again; "requests": 0 ends them
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import uvloop

from benchmarks.control_plane.fleet import serve
from benchmarks.gateway.lean_http import EventStream, request
from benchmarks.gateway.stream_plan import STREAM_TOKENS

#: Streams that are being opened at once.
_OPENING: Final = 64
_PATIENCE_S: Final = 120.0
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["query"],
        },
    },
}


def stream_body(run_id: str, number: int) -> dict[str, Any]:
    """A chat with a tool; each has a text of its own."""
    messages = [{"role": "system", "content": "You search."}, {"role": "user", "content": f"Look for number {number}."}]
    return {"model": run_id, "messages": messages, "tools": [_TOOL], "max_tokens": STREAM_TOKENS, "stream": True}


class StreamClients:
    """All streams of one gateway and run."""

    def __init__(self, address: str, run_id: str) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port, self._run_id = host, int(port), run_id
        self._streams: list[EventStream] = []
        self._gaps: list[float] = []
        self._since, self._events, self._cpu = time.monotonic(), 0, time.process_time()
        self._number = 0
        self._greedy: asyncio.Task[None] | None = None
        self._rounds = 0
        self._failures: Counter[str] = Counter()

    def orders(self) -> dict[str, Callable[..., Any]]:
        return {"open": self.open, "measure": self.measure, "close": self.close, "greedy": self.greedy}

    async def open(self, keys: list[str], streams: int) -> dict[str, Any]:
        began, places = time.monotonic(), asyncio.Semaphore(_OPENING)
        told = await asyncio.gather(*(self._open(key, places) for _ in range(streams) for key in keys))
        refused = Counter(one for one in told if one != "open")
        return {"open": told.count("open"), "refused": refused, "seconds": round(time.monotonic() - began, 2)}

    async def _open(self, key: str, places: asyncio.Semaphore) -> str:
        async with places:
            self._number += 1
            body = stream_body(self._run_id, self._number)
            stream = await self._begun(request("POST", "/v1/chat/completions", key, body))
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    told = await stream.first
            except TimeoutError:
                told = f"no event within {_PATIENCE_S:g} s"
            if told == "open":
                self._streams.append(stream)
            else:
                stream.close()
            return told

    async def _begun(self, sent: bytes) -> EventStream:
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(lambda: EventStream(sent, self._gaps), self._host, self._port)
        return stream

    def measure(self) -> dict[str, Any]:
        now, events, cpu = time.monotonic(), sum(one.events for one in self._streams), time.process_time()
        gaps = sorted(self._gaps)
        found = {
            "streams": sum(not one.over.is_set() for one in self._streams),
            "events_per_s": round((events - self._events) / (now - self._since), 1),
            "gap_p50_s": round(gaps[len(gaps) // 2], 3) if gaps else None,
            "gap_p99_s": round(gaps[len(gaps) * 99 // 100], 3) if gaps else None,
            "cpu_share": round((cpu - self._cpu) / (now - self._since), 3),
            "greedy_rounds": self._rounds,
            "failures": dict(self._failures.most_common(5)),
        }
        self._gaps.clear()
        self._since, self._events, self._cpu, self._rounds = now, events, cpu, 0
        return found

    async def close(self, keep: int) -> dict[str, Any]:
        leaving, self._streams = self._streams[keep:], self._streams[:keep]
        for stream in leaving:
            stream.close()
        await asyncio.gather(*(stream.over.wait() for stream in leaving))
        self._events = sum(one.events for one in self._streams)
        return {"left": len(leaving)}

    async def greedy(self, key: str, requests: int, completions: int, tokens: int) -> dict[str, Any]:
        if self._greedy is not None:
            self._greedy.cancel()
            await asyncio.gather(self._greedy, return_exceptions=True)
            self._greedy = None
        if requests:
            self._greedy = asyncio.create_task(self._ask_again(key, requests, completions, tokens))
        return {}

    async def _ask_again(self, key: str, requests: int, completions: int, tokens: int) -> None:
        while True:
            begun = []
            for _ in range(requests):
                self._number += 1
                body = stream_body(self._run_id, self._number) | {"n": completions, "max_tokens": tokens}
                begun.append(await self._begun(request("POST", "/v1/chat/completions", key, body)))
            try:
                for stream in begun:
                    await stream.over.wait()
                    if (told := await stream.first) != "open":
                        self._failures[told] += 1
                self._rounds += 1
            finally:
                for stream in begun:
                    stream.close()
            await asyncio.sleep(0.1)


if __name__ == "__main__":

    async def main() -> None:
        address, run_id = sys.argv[1:]
        await serve(StreamClients(address, run_id))

    uvloop.run(main())
