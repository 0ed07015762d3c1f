"""Attempts enter the engine as its memory allows, and leave it behind their newest token."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from ebbtide.rollout_worker.engine.scripted_engine import END, ScriptedEngine, follow
from ebbtide.rollout_worker.generation.generation import Assignment
from ebbtide.rollout_worker.generation.local_attempts import HandBack, LocalAttempts
from ebbtide.rollout_worker.generation.outbox import Outbox
from ebbtide.rollout_worker.settings import ScriptedSettings
from ebbtide.testing import wait_until
from ebbtide.types.append_delta import AppendAck
from ebbtide.types.end_cause import EndCause
from ebbtide.types.fleet import AppendStatus, AttemptRef
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import TOKEN_BYTES, pack_ids, unpack_tokens

PROMPT = [7, 8, 9]


class Desk:
    """A worker's attempts, and a store that takes all tokens at once."""

    def __init__(self, settings: ScriptedSettings, *, by_memory: bool) -> None:
        self.settings, self._by_memory = settings, by_memory
        self.engine = ScriptedEngine(settings)
        self.outbox = Outbox(flush_tokens=8, flush_interval_s=0.005)
        self.tokens = dict[str, bytes]()
        self.finished = set[str]()
        self.back = dict[str, HandBack]()
        self.inside = self.most = 0

    async def open(self) -> None:
        info = await self.engine.start()
        generate = self.engine.generate

        async def counted(request: Any) -> AsyncGenerator[Any, None]:
            self.inside += 1
            self.most = max(self.most, self.inside)
            try:
                async for delta in generate(request):
                    yield delta
            finally:
                self.inside -= 1

        self.engine.generate = counted  # type: ignore[method-assign]
        self.attempts = LocalAttempts(
            self.engine, info, self.outbox, None, release=self._released, fail=self._failed, by_memory=self._by_memory
        )
        self._storing = asyncio.create_task(self._store())

    async def close(self) -> None:
        self._storing.cancel()
        await asyncio.wait({self._storing})
        await self.attempts.close()
        await self.engine.stop()

    def assign(self, name: str, tokens: int, *, expected: int = 0, partial: bytes = b"", prompt: Any = PROMPT) -> None:
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        ref = AttemptRef("run", name, name)
        self.tokens[name] = partial
        self.attempts.start(
            Assignment(
                attempt=ref,
                policy="p",
                prompt_ids=pack_ids(prompt),
                sampling=sampling,
                partial=partial,
                expected_tokens=expected,
            )
        )

    def _released(self, refs: list[AttemptRef], why: HandBack) -> None:
        self.back |= dict.fromkeys((ref.attempt_id for ref in refs), why)

    def _failed(self, error: BaseException) -> None:
        raise AssertionError from error

    async def _store(self) -> None:
        while True:
            self.attempts.flush()
            batch = self.outbox.take(1 << 20)
            acks = []
            for delta in batch:
                name = delta.attempt.attempt_id
                self.tokens[name] += delta.tokens
                stored = len(self.tokens[name]) // TOKEN_BYTES
                acks.append(AppendAck(name, AppendStatus.STORED, stored, finished=delta.finish is not None))
                if delta.finish is not None:
                    self.finished.add(name)
            self.attempts.settle(acks, durable=True)
            await asyncio.sleep(0.002)
