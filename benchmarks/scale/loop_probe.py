"""Measures each callback of an event loop in CPU time of its thread, and the memory of its process.

The product knows nothing of it: a loop that is made by `probed_loop` wraps what it is given to call. A wrapped callback
takes about a microsecond longer.
"""

import asyncio
import ctypes
import gc
import json
import math
import os
import re
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import uvloop

#: So many of the longest callbacks are named.
_NAMED: Final = 12
#: The longest callback of each stretch of so many seconds counts once.
_STRETCH_S: Final = 0.1
#: The coordinator's tasks that decide, as it names them.
DECIDING: Final = ("decide", "watch", "reap")
_BLOCKS: Final = re.compile(rb"# bytes in allocated blocks\s*=\s*([\d,]+)")


class LoopProbe:
    """What the loop's callbacks took since `reset`, in seconds of CPU time of the thread."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}  # by name: what `timed` functions took in all
        self.reset()

    def reset(self) -> None:
        self._callbacks, self._decisions, self._stretches = array("f"), array("f"), array("f")
        self._longest: list[tuple[float, float, str]] = []
        self._stretch_end = self._stretch = 0.0
        self._spent = dict.fromkeys(self._spent, 0.0)
        self._began, self._cpu = time.monotonic(), time.process_time()
        self._collections = array("f")
        self._collected = 0.0  # by the garbage collector, in the callback that runs
        self._muted = False

    def mute(self) -> None:
        """Leave out the callback that runs now: it measures."""
        self._muted = True

    def ran(self, seconds: float, callback: Callable[..., object], task: "asyncio.Task[Any] | None") -> None:
        collected, self._collected = self._collected, 0.0
        if self._muted:
            self._muted = False
            return
        self._callbacks.append(seconds)
        now = time.monotonic()
        if now > self._stretch_end:
            self._stretches.append(self._stretch)
            self._stretch, self._stretch_end = 0.0, now + _STRETCH_S
        self._stretch = max(self._stretch, seconds)
        if task is not None and task.get_name() in DECIDING:
            self._decisions.append(seconds)
        if len(self._longest) < _NAMED or seconds > self._longest[-1][0]:
            self._longest.append((seconds, collected, _name(callback, task)))
            self._longest.sort(reverse=True)
            del self._longest[_NAMED:]

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The synchronous function, whose CPU time is added up under `name`."""
        self._spent[name] = 0.0

        def measured(*args: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                self._spent[name] += time.thread_time() - began

        return measured

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which a transport calls by itself, counted as a callback."""

        def measured(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args)
            finally:
                self.ran(time.thread_time() - began, function, None)

        return measured

    def watch_collector(self) -> None:
        """Measure the garbage collector's pauses; a callback's time has them, too."""
        began = [0.0]

        def told(phase: str, _info: dict[str, int]) -> None:
            if phase == "start":
                began[0] = time.thread_time()
            else:
                took = time.thread_time() - began[0]
                self._collections.append(took)
                self._collected += took

        gc.callbacks.append(told)

    def read(self) -> dict[str, Any]:
        """What was seen since `reset`."""
        kinds = {
            "callbacks": self._callbacks,
            "decisions": self._decisions,
            "stretches": self._stretches,
            "collections": self._collections,
        }
        return {
            "seconds": time.monotonic() - self._began,
            "cpu_s": time.process_time() - self._cpu,
            **{name: summary(values) for name, values in kinds.items()},
            "longest": [
                {"ms": round(seconds * 1e3, 2), "collector_ms": round(collected * 1e3, 2), "name": name}
                for seconds, collected, name in self._longest
            ],
            "spent_s": dict(self._spent),
        }


def answering_loop(probe: LoopProbe) -> Callable[[], Any]:
    """Makes a loop that is measured, and answers questions on the unix socket that EBBTIDE_PROBE names, one JSON line
    each: "read" (what was seen, which begins anew then) and "memory" (bytes in use).
    """
    tasks: list[asyncio.Task[None]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while question := await reader.readline():
            found: dict[str, Any] = {"bytes": bytes_in_use()} if question == b"memory\n" else probe.read()
            writer.write(json.dumps(found).encode() + b"\n")
            await writer.drain()
            probe.reset()
            probe.mute()
        writer.close()

    async def listen() -> None:
        server = await asyncio.start_unix_server(answer, os.environ["EBBTIDE_PROBE"])
        await server.serve_forever()

    def made() -> Any:
        loop = probed_loop(probe)
        loop.call_soon(lambda: tasks.append(loop.create_task(listen())))
        return loop

    return made


async def ask(socket: Path, what: str) -> dict[str, Any]:
    """Ask a process whose loop `answering_loop` made: "read" or "memory"."""
    reader, writer = await asyncio.open_unix_connection(socket, limit=1 << 24)
    try:
        writer.write(f"{what}\n".encode())
        found: dict[str, Any] = json.loads(await reader.readline())
        return found
    finally:
        writer.close()


def summary(seconds: "array[float]") -> dict[str, Any]:
    """`p50_ms`, `p99_ms` (by nearest rank), `max_ms` and the count; nulls without values. Quick for millions."""
    ordered = np.sort(np.frombuffer(seconds, np.float32)) if len(seconds) else np.zeros(0, np.float32)
    count = len(ordered)

    def rank(share: float) -> float | None:
        return round(float(ordered[min(count - 1, math.ceil(share * count) - 1)]) * 1e3, 3) if count else None

    return {"p50_ms": rank(0.5), "p99_ms": rank(0.99), "max_ms": rank(1.0), "count": count}


def _name(callback: Callable[..., object], task: "asyncio.Task[Any] | None") -> str:
    if task is None:
        return getattr(callback, "__qualname__", type(callback).__name__)
    coroutine = task.get_coro()
    return f"{task.get_name()}: {getattr(coroutine, '__qualname__', '')}"


def probed_loop(probe: LoopProbe, kind: type[Any] = uvloop.Loop) -> Any:
    """A loop of `kind` whose callbacks `probe` measures. Transports' own reads and writes are not among them."""

    def measured(callback: Callable[..., object]) -> Callable[..., object]:
        def run(*args: Any) -> None:
            began = time.thread_time()
            try:
                callback(*args)
            finally:
                owner = getattr(callback, "__self__", None)
                probe.ran(time.thread_time() - began, callback, owner if isinstance(owner, asyncio.Task) else None)

        return run

    class ProbedLoop(kind):  # type: ignore[misc]
        def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
            return super().call_soon(measured(callback), *args, context=context)

        def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
            return super().call_soon_threadsafe(measured(callback), *args, context=context)

        def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
            return super().call_later(delay, measured(callback), *args, context=context)

        def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
            return super().call_at(when, measured(callback), *args, context=context)

        def add_reader(self, descriptor: Any, callback: Any, *args: Any) -> Any:
            return super().add_reader(descriptor, measured(callback), *args)

    return ProbedLoop()


def bytes_in_use() -> int:
    """Bytes that live objects hold: Python's own blocks, and what was taken from malloc. Collects garbage first."""
    for _ in range(3):
        gc.collect()
    return _python_bytes() + _malloc_bytes()


def _python_bytes() -> int:
    """Bytes of the small objects that Python's allocator holds. It prints them on the standard error alone."""
    import sys

    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            sys._debugmallocstats()  # noqa: SLF001 - there is no other way to this figure
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        said.seek(0)
        found = _BLOCKS.search(said.read())
    if found is None:
        raise RuntimeError("Python's allocator does not say how many bytes are in use; run it without PYTHONMALLOC")
    return int(found[1].replace(b",", b""))


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    ]


def _malloc_bytes() -> int:
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallInfo
    found = libc.mallinfo2()
    return int(found.uordblks + found.hblkhd)
