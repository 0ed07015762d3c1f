"""An engine that follows a script: each token is a pure function of all tokens before it, so that a resume must
continue exactly, whoever generated the partial. For tests, chaos and scale; its weights change nothing but the
version.
"""

import asyncio
import time
import zlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from pathlib import Path
from typing import Final

from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker.engine import EngineFailed, EngineRequest, Shapes, TokenDelta, checkpoint
from ebbtide.rollout_worker.settings import ScriptedSettings
from ebbtide.types.fleet import EngineInfo
from ebbtide.types.rollout import FinishReason

#: The token that ends a response.
END: Final = 1
#: Ids below are never generated but for END, so that tests may use them as they like.
_FIRST: Final = 2


class Script:
    """What follows a sequence of tokens."""

    def __init__(self, settings: ScriptedSettings, token_ids: Iterable[int]) -> None:
        self._settings = settings
        self._state = 0
        for token in token_ids:
            self._state = zlib.crc32(token.to_bytes(4, "little"), self._state)

    def next(self) -> tuple[int, float]:
        """The next token and its logprob."""
        state, mean = self._state, self._settings.mean_length
        ends = mean > 0 and (state >> 8) % mean == 0
        token = END if ends else _FIRST + state % (self._settings.vocab_size - _FIRST)
        self._state = zlib.crc32(token.to_bytes(4, "little"), state)
        return token, -(state % 1024) / 1024


def follow(settings: ScriptedSettings, token_ids: Sequence[int], count: int) -> list[tuple[int, float]]:
    """The `count` tokens and logprobs that follow `token_ids`, ends not regarded."""
    script = Script(settings, token_ids)
    return [script.next() for _ in range(count)]


class ScriptedEngine:
    """Implements `Engine`; see there."""

    def __init__(self, settings: ScriptedSettings) -> None:
        self._settings = settings
        self._version = self.tokens = 0
        self._paused: set[str] = set()
        self._going = asyncio.Event()
        self._going.set()
        self._lost = False

    @property
    def shapes(self) -> Shapes:
        return {}

    async def start(self) -> EngineInfo:
        await asyncio.sleep(self._settings.boot_s)
        return EngineInfo(
            model="scripted",
            vocab_size=self._settings.vocab_size,
            max_model_len=self._settings.max_model_len,
            eos_token_ids=(END,),
            architecture="scripted",
        )

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        script = Script(self._settings, request.token_ids)
        await asyncio.sleep(self._settings.first_token_s)
        for made in range(1, request.max_tokens + 1):
            await asyncio.sleep(self._settings.step_s)
            await self._going.wait()
            await self._fault()
            token, logprob = script.next()
            self.tokens += 1
            finish = None
            if token in request.stop_token_ids and made > request.min_tokens:
                finish = FinishReason.STOP
            elif made == request.max_tokens:
                finish = FinishReason.LENGTH
            yield TokenDelta([token], [logprob], [self._version], finish)
            if finish is not None:
                return

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in token_ids)

    async def install(self, version: int, weights: Path) -> float:
        if version == self._settings.refuse_version:
            raise InvalidRequest(f"version {version} was refused, as scripted", field="weights")
        checkpoint.header(weights)
        start = time.monotonic()
        await self.pause("install")
        await asyncio.sleep(self._settings.install_s)
        self._version = version
        await self.resume("install")
        return time.monotonic() - start

    async def pause(self, reason: str) -> None:
        self._paused.add(reason)
        self._going.clear()

    async def resume(self, reason: str) -> None:
        self._paused.discard(reason)
        if not self._paused:
            self._going.set()

    def check(self) -> None:
        if self._lost:
            raise EngineFailed("lost, as scripted")

    async def stop(self) -> None:
        """Nothing to stop."""

    async def _fault(self) -> None:
        if 0 < self._settings.stall_after_tokens <= self.tokens:
            await asyncio.Event().wait()
        if 0 < self._settings.fail_after_tokens <= self.tokens:
            self._lost = True
        self.check()
