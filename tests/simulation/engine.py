"""The scripted engine, whose every token tells which attempt made it, and with which weights.

The lowest twelve bits of a logprob's mantissa, which the script leaves zero, hold a tag of the attempt: so what lies
in the store says who put it there, whatever messages it came through.
"""

import json
import struct
import zlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

from ebbtide.rollout_worker.engine import EngineRequest, TokenDelta
from tests.fakes.scripted_engine import ScriptedEngine
from tests.simulation.loop import Proc, current

TAG_MASK: Final = 0xFFF
_FLOAT: Final = struct.Struct("<f")
_BITS: Final = struct.Struct("<I")
_SIZE: Final = struct.Struct("<Q")
#: Told of a request that begins (no token), and of each token: process, attempt, version or 0, mark of the weights.
Told = Callable[[Proc, str, int, float], None]


def tag_of(attempt_id: str) -> int:
    return (zlib.crc32(attempt_id.encode()) & TAG_MASK) or 1


def marked(logprob: float, tag: int) -> float:
    (bits,) = _BITS.unpack(_FLOAT.pack(logprob))
    (value,) = _FLOAT.unpack(_BITS.pack(bits | tag))
    return float(value)


def read_mark(weights: Path) -> float:
    """The first value of the tensor `w` in a safetensors file."""
    with weights.open("rb") as file:
        (size,) = _SIZE.unpack(file.read(_SIZE.size))
        first = json.loads(file.read(size))["w"]["data_offsets"][0]
        file.seek(_SIZE.size + size + first)
        (value,) = _FLOAT.unpack(file.read(_FLOAT.size))
    return float(value)


def engine_class(base: type[ScriptedEngine], told: Told) -> type[ScriptedEngine]:
    """The engine that tells of its tokens."""

    class SimEngine(base):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._proc = current.get()
            self._marks: dict[int, float] = {}  # version -> mark of the weights that were installed last as this one

        async def install(self, version: int, weights: Path, changes: Path | None = None) -> float:
            mark = read_mark(weights)
            paused_s: float = await super().install(version, weights, changes)
            self._marks[version] = mark
            return paused_s

        async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
            attempt_id = request.request_id
            tag = tag_of(attempt_id)
            told(self._proc, attempt_id, 0, 0.0)
            async with aclosing(super().generate(request)) as stream:
                async for delta in stream:
                    told(self._proc, attempt_id, delta.versions[0], self._marks.get(delta.versions[0], 0.0))
                    yield delta._replace(logprobs=[marked(one, tag) for one in delta.logprobs])

    return SimEngine
