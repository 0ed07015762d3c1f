"""Measures how many tokens a second one worker process takes from its engine to the message for the coordinator.

    python -m benchmarks.token_path [--requests N] [--tokens N] [--intervals 1,8] [--out FILE]

vLLM's engine core is played (`tests/fakes/played_core.py`): in each step it makes one token of each request, as an
encoded message. All behind it is real and in this process: vLLM decodes the message, its output processor and
generators deliver outputs, the worker accepts them (`VllmEngine`, `LocalAttempts`, ledger, memory gate, `Outbox`) and
packs messages for the coordinator, which acknowledges each at once. What the core itself does, sockets, and the
coordinator's answers are not in it.

`tokens_s`: tokens by seconds of processor time of the process, so that other work on the machine hardly matters: what
one core can do if the worker's process has it alone. Figures are of the best of several rounds.
"""

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import uvloop
from msgspec import Struct
from msgspec.structs import asdict

from benchmarks.arguments import count
from benchmarks.conditions import conditions
from benchmarks.log_level import errors_only
from benchmarks.real_kills.checkpoint import make_checkpoint
from ebbtide.append_stream import AppendAck, AppendSender
from ebbtide.ledger import Ledger
from ebbtide.rollout_worker.generation.generation import Assignment
from ebbtide.rollout_worker.generation.local_attempts import LocalAttempts
from ebbtide.rollout_worker.generation.outbox import Outbox
from ebbtide.rollout_worker.settings import VllmSettings, WorkerSettings
from ebbtide.types.fleet import AppendStatus, AttemptRef, EngineInfo
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import TOKEN_BYTES, pack_ids
from tests.fakes.played_core import PlayedCore, played_engine
from tests.support.waiting import wait_until

_PROMPT: Final = 32
_VOCABULARY: Final = 128
_ROUNDS: Final = 3
#: Rounds of the loop after each step, in which all that became ready runs: the core is never ahead of the worker.
_SETTLE: Final = 6


class TokenPathPlan(Struct, frozen=True, kw_only=True):
    """`tokens`: steps, and so tokens of each request. `intervals`: tokens of a request that are delivered together."""

    requests: int = 512
    tokens: int = 256
    intervals: tuple[int, ...] = (1, 8)


class Worker:
    """The worker's part between its engine and the append stream, and a store that answers at once."""

    def __init__(self, model: Path, plan: TokenPathPlan, interval: int, ledger: Ledger) -> None:
        settings = WorkerSettings()
        context = _PROMPT + plan.tokens + 1
        vllm = VllmSettings(dtype="float32", enforce_eager=True, kv_cache_mib=64, max_model_len=context)
        self.engine, self.core = played_engine(model, plan.requests, vllm)
        info = EngineInfo(
            model="m",
            vocab_size=_VOCABULARY,
            max_model_len=context,
            kv_tokens=plan.requests * (context + 64),
            kv_block=16,
            shares_prefixes=True,
        )
        self.outbox = Outbox(
            flush_tokens=settings.flush_tokens,
            flush_interval_s=settings.flush_interval_ms / 1000,
            stream_interval=interval,
        )
        self.attempts = LocalAttempts(
            self.engine,
            info,
            self.outbox,
            ledger,
            release=lambda *_: None,
            fail=_fail,
            slots=plan.requests,
            stream_interval=interval,
        )
        self._sender, self.sent = AppendSender(), 0

    def start(self, requests: int, tokens: int) -> None:
        for number in range(requests):
            name = f"rollout-{number}"
            prompt = pack_ids([number % 90 + 2] * _PROMPT)
            sampling = Sampling(max_tokens=tokens, ignore_eos=True)
            attempt = AttemptRef("run", name, f"{name}/0")
            self.attempts.start(Assignment(attempt=attempt, policy="p", prompt_ids=prompt, sampling=sampling))

    async def store(self) -> None:
        """Send what is due, forever."""
        while True:
            self.attempts.due.clear()
            if (wait := self.outbox.due - time.monotonic()) > 0:
                try:
                    async with asyncio.timeout(min(wait, 1.0)):
                        await self.attempts.due.wait()
                except TimeoutError:
                    pass
                continue
            self.answer(await self.attempts.message())

    def answer(self, message: Any) -> None:
        request = self._sender.request(message.number, message.deltas).SerializeToString()
        self.sent += len(request)
        acks = [
            AppendAck(
                delta.ref.attempt_id,
                AppendStatus.STORED,
                delta.offset + len(delta.tokens) // TOKEN_BYTES,
                delta.finish is not None,
                message.number,
            )
            for delta in message.deltas
        ]
        self.attempts.settle(acks, durable=True)


def _fail(error: BaseException) -> None:
    raise error


async def measure(model: Path, plan: TokenPathPlan, interval: int) -> dict[str, Any]:
    """One round. Raises `AssertionError` if a token is missing in the end."""
    with tempfile.TemporaryDirectory() as folder, Ledger(Path(folder) / "ledger") as ledger:
        worker = Worker(model, plan, interval, ledger)
        storing = asyncio.create_task(worker.store())
        worker.start(plan.requests, plan.tokens)
        await wait_until(lambda: len(worker.core.requests) == plan.requests)
        messages = _messages(worker.core, plan)
        gc.collect()
        gc.freeze()  # as the worker does
        cpu, wall = time.process_time(), time.monotonic()
        for message in messages:
            worker.core.send(message)
            for _ in range(_SETTLE):
                await asyncio.sleep(0)
        await worker.attempts.empty.wait()
        cpu, wall = time.process_time() - cpu, time.monotonic() - wall
        storing.cancel()
        total = plan.requests * plan.tokens
        if worker.attempts.tokens != total:
            raise AssertionError(f"{worker.attempts.tokens} of {total} tokens arrived")
        return {"tokens_s": round(total / cpu), "us_per_token": round(1e6 * cpu / total, 2), "wall_s": round(wall, 3)}


def _messages(core: PlayedCore, plan: TokenPathPlan) -> list[Any]:
    """All steps' messages, made before the time is taken."""
    messages = []
    for step in range(plan.tokens):
        messages.append(core.encoded([2 + step % 90] * len(core.requests), first=not step))
        for name in core.made:
            core.made[name] += 1
    return messages


async def measure_all(plan: TokenPathPlan, model: Path) -> dict[str, Any]:
    """The best round of each interval, in turns."""
    found: dict[int, list[dict[str, Any]]] = {interval: [] for interval in plan.intervals}
    for _ in range(_ROUNDS):
        for interval in plan.intervals:
            found[interval].append(await measure(model, plan, interval))
    return {
        f"interval_{interval}": max(rounds, key=lambda one: one["tokens_s"])
        | {"rounds": [r["tokens_s"] for r in rounds]}
        for interval, rounds in found.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = TokenPathPlan()
    parser.add_argument("--requests", type=count, default=defaults.requests)
    parser.add_argument("--tokens", type=count, default=defaults.tokens)
    parser.add_argument("--intervals", type=lambda text: tuple(map(count, text.split(","))), default=defaults.intervals)
    parser.add_argument("--out", type=Path)
    arguments = vars(parser.parse_args())
    out: Path | None = arguments.pop("out")
    plan = TokenPathPlan(**arguments)
    before = conditions()
    errors_only()
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder) / "model", 1, vocab_size=_VOCABULARY, positions=_PROMPT + plan.tokens + 1)
        figures = uvloop.run(measure_all(plan, model))  # as the worker does
    text = json.dumps({"conditions": before, "plan": asdict(plan), "figures": figures}, indent=2)
    print(text)
    if out:
        out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
