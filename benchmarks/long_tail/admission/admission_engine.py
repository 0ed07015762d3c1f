"""Runs the part `admission` on one vLLM engine, in a process of its own. Prints what it found as JSON.

    python -m benchmarks.long_tail.admission.admission_engine CHECKPOINT BLOCKS < WORKS

The engine and the worker's own `LocalAttempts` are the live ones. A store that takes tokens at once stands for the
coordinator. Each work is done under each arrangement, in an order that turns with the works; nothing cached is left
from one to the next.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any, Final

from benchmarks.long_tail.admission.admitted_work import BLOCK, WorkItem, unpacked_works
from ebbtide.append_stream import AppendAck
from ebbtide.rollout_worker.engine import EngineRequest, TokenDelta
from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine
from ebbtide.rollout_worker.generation.generation import Assignment
from ebbtide.rollout_worker.generation.local_attempts import LocalAttempts, ReleaseReason
from ebbtide.rollout_worker.generation.outbox import Outbox
from ebbtide.rollout_worker.settings import VllmSettings
from ebbtide.types.fleet import AppendStatus, AttemptRef, EngineInfo
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import pack_ids, token_count

#: By name: whether memory admits, and whether forecasts are given.
ARRANGEMENTS: Final = {"none": (False, False), "chunks": (True, False), "forecasts": (True, True)}
_SLOTS: Final = 256
_STORE_S: Final = 0.02


class ReadAgain:
    """An engine, and the tokens that it read of attempts that it had before."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._known: set[str] = set()
        self.tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        again, first = request.request_id in self._known, True
        self._known.add(request.request_id)
        stream = self._engine.generate(request)
        try:
            async for delta in stream:
                if first and again:
                    self.tokens += len(request.token_ids) - delta.cached
                first = False
                yield delta
        finally:
            await stream.aclose()


class AtOnce:
    """Stores all tokens as soon as it looks, and gives attempts that are handed back to the worker again."""

    def __init__(
        self, engine: ReadAgain, info: EngineInfo, work: list[WorkItem], *, admits: bool, forecasts: bool
    ) -> None:
        self._work, self._forecasts = {item.name: item for item in work}, forecasts
        self._outbox = Outbox(flush_tokens=1 << 20, flush_interval_s=_STORE_S)
        self.stored = {item.name: b"" for item in work}
        self.done: set[str] = set()
        self.handed_back = 0
        found: Any = engine
        self.attempts = LocalAttempts(
            found, info, self._outbox, None, release=self._released, fail=_failed, slots=_SLOTS, by_memory=admits
        )

    async def run(self) -> None:
        for name in self._work:
            self._assign(name)
        while len(self.done) < len(self._work):
            await asyncio.sleep(_STORE_S)
            self._store()

    def _assign(self, name: str) -> None:
        item, partial = self._work[name], self.stored[name]
        self.attempts.start(
            Assignment(
                attempt=AttemptRef("run", name, f"{name}/{self.handed_back}"),
                policy="p",
                prompt_ids=pack_ids(item.prompt),
                sampling=Sampling(max_tokens=item.length, ignore_eos=True, temperature=1.0),
                partial=partial,
                expected_tokens=max(1, item.forecast - token_count(partial)) if self._forecasts else 0,
            )
        )

    def _store(self) -> None:
        self.attempts.flush()
        message, acks = self._outbox.take(time.monotonic()), []
        for delta in message.deltas:
            name, finished = delta.ref.rollout_id, delta.finish is not None
            self.stored[name] += delta.tokens
            length = token_count(self.stored[name])
            acks.append(AppendAck(delta.ref.attempt_id, AppendStatus.STORED, length, finished, message.number))
            if finished:
                self.done.add(name)
        self.attempts.settle(acks, durable=True)

    def _released(self, refs: list[AttemptRef], _: ReleaseReason) -> None:
        for ref in refs:
            self.handed_back += 1
            asyncio.get_running_loop().call_soon(self._assign, ref.rollout_id)


def _failed(error: BaseException) -> None:
    raise error


async def arranged(engine: VllmEngine, info: EngineInfo, work: list[WorkItem], name: str) -> dict[str, Any]:
    """One work under one arrangement."""
    admits, forecasts = ARRANGEMENTS[name]
    await engine.give_up_cache()
    watched, before = ReadAgain(engine), engine.preemptions
    store = AtOnce(watched, info, work, admits=admits, forecasts=forecasts)
    began = time.monotonic()
    await store.run()
    took_s, tokens = time.monotonic() - began, sum(item.length for item in work)
    if any(token_count(store.stored[item.name]) != item.length for item in work):
        raise AssertionError("a response has not the length that was asked for")
    return {
        "arrangement": name,
        "rollouts": len(work),
        "tokens": tokens,
        "seconds": took_s,
        "preemptions": engine.preemptions - before,
        "parked": store.attempts.gate.parked,
        "handed_back": store.handed_back,
        "made": store.attempts.tokens,
        "read_again": watched.tokens if admits else None,  # what an engine reads after preemptions it does not say
    }


async def main(checkpoint: str, blocks: str) -> None:
    works = unpacked_works(sys.stdin.read())
    arguments = {"num_gpu_blocks_override": int(blocks), "block_size": BLOCK}
    settings = VllmSettings(dtype="float32", enforce_eager=True, threads=1, engine_args=json.dumps(arguments))
    engine = VllmEngine(checkpoint, _SLOTS, settings)
    try:
        info = await engine.start()
        names, found = list(ARRANGEMENTS), []
        for number, work in enumerate(works):
            turn = number % len(names)
            for name in (*names[turn:], *names[:turn]):
                found.append(await arranged(engine, info, work, name) | {"seed": number})
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    finally:
        await engine.stop()
    print(json.dumps({"kv_tokens": info.kv_tokens, "kv_block": info.kv_block, "works": found}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
