"""The ledger hears of every attempt's end, so that its records can be used again."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from ebbtide.append_stream import AppendAck
from ebbtide.ledger import Ledger
from ebbtide.rollout_worker.engine import EngineRequest, TokenDelta
from ebbtide.rollout_worker.generation.generation import Assignment
from ebbtide.rollout_worker.generation.local_attempts import LocalAttempts
from ebbtide.rollout_worker.generation.outbox import Outbox
from ebbtide.types.fleet import AppendStatus, AttemptRef, EngineInfo
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import pack_ids
from tests.support.waiting import wait_until

INFO = EngineInfo(model="m", vocab_size=100, max_model_len=64)


class OneTokenEngine:
    """Makes one token of each request, and then waits."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        yield TokenDelta([5], [-0.5], [1], None)
        await asyncio.Event().wait()

    def deliver(self, request_id: str | None = None) -> None: ...

    def decode(self, ids: list[int]) -> str:
        return ""


async def test_finished_and_cancelled_attempts_end_in_the_ledger(tmp_path: Path, monkeypatch: Any) -> None:
    with Ledger(tmp_path / "ledger") as ledger:
        ended: list[int] = []
        monkeypatch.setattr(ledger, "end", ended.append)
        outbox = Outbox(flush_tokens=8, flush_interval_s=0.01)
        engine: Any = OneTokenEngine()
        attempts = LocalAttempts(engine, INFO, outbox, ledger, release=lambda *_: None, fail=lambda _: None)
        refs = {name: AttemptRef("run", name, name) for name in ("finishes", "cancelled")}
        for name, most in (("finishes", 1), ("cancelled", 9)):
            sampling = Sampling(max_tokens=most)
            attempts.start(Assignment(attempt=refs[name], policy="p", prompt_ids=pack_ids([1]), sampling=sampling))
        await wait_until(lambda: attempts.tokens == 2 and attempts.running == 1)
        assert ended == [], "a finished attempt is held until it is durable"
        attempts.settle([AppendAck("finishes", AppendStatus.STORED, 1, finished=True)], durable=True)
        attempts.drop([refs["cancelled"]], "cancelled")
        await wait_until(lambda: len(set(ended)) == 2)
        assert attempts.empty.is_set()
