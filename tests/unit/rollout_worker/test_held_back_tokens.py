"""Tokens that vLLM holds back to deliver several together are never lost beyond the flush window: its own output
processor and generators, with a core that is played.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from benchmarks.real_kills.checkpoint import make_checkpoint
from ebbtide.append_stream import AppendAck
from ebbtide.rollout_worker.control_handler import throttle
from ebbtide.rollout_worker.engine import EngineFailed
from ebbtide.rollout_worker.generation.generation import Assignment
from ebbtide.rollout_worker.generation.local_attempts import LocalAttempts, ReleaseReason
from ebbtide.rollout_worker.generation.outbox import Outbox
from ebbtide.rollout_worker.settings import VllmSettings, WorkerSettings
from ebbtide.types.fleet import AppendStatus, AttemptRef, EndCause, EngineInfo
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import pack_ids, token_count, unpack_tokens
from tests.support.waiting import wait_until

pytest.importorskip("vllm")
# Importing vLLM and torch warns of what they deprecate themselves.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

INTERVAL: Final = 8
WINDOW: Final = 32
INFO: Final = EngineInfo(model="m", vocab_size=128, max_model_len=256)
LEFT: Final = ReleaseReason(EndCause.WORKER_LEAVES, "it leaves")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), 1, positions=256)


class Stand:
    """A worker's part between a played core and the store. `stored`: tokens of each attempt, packed."""

    def __init__(self, model: Path, flush_s: float) -> None:
        from tests.fakes.played_core import played_engine

        settings = VllmSettings(dtype="float32", enforce_eager=True, kv_cache_mib=64, max_model_len=256)
        self.engine, self.core = played_engine(model, 8, settings)
        self.outbox = Outbox(flush_tokens=WINDOW, flush_interval_s=flush_s, stream_interval=INTERVAL)
        self.released: list[str] = []
        self.failures: list[BaseException] = []
        self.attempts = LocalAttempts(
            self.engine,
            INFO,
            self.outbox,
            None,
            release=lambda refs, _: self.released.extend(ref.rollout_id for ref in refs),
            fail=self.failures.append,
            stream_interval=INTERVAL,
        )
        self.stored: dict[str, bytes] = {}
        self.answers = True

    async def start(self, *names: str, **options: Any) -> None:
        for name in names:
            sampling = Sampling(max_tokens=200, ignore_eos=True, stop=options.pop("stop", ()))
            assignment = Assignment(
                attempt=AttemptRef("run", name, name),
                policy="p",
                prompt_ids=pack_ids([7]),
                sampling=sampling,
                **options,
            )
            self.attempts.start(assignment)
        await wait_until(lambda: all(name in self.core.made for name in names))

    async def steps(self, count: int) -> None:
        """Steps of the core, each of which arrives before the next one."""
        for _ in range(count):
            self.core.step()
            for _ in range(8):
                await asyncio.sleep(0)

    async def store(self) -> None:
        """Take what is due, forever; answer it unless the store hangs."""
        while True:
            await wait_until(lambda: self.outbox.due <= time.monotonic())
            message, acks = await self.attempts.message(), []
            for delta in message.deltas:
                name = delta.ref.attempt_id
                self.stored[name] = self.stored.get(name, b"")[: 12 * delta.offset] + delta.tokens
                finished = delta.finish is not None
                acks.append(AppendAck(name, AppendStatus.STORED, self.count(name), finished, message.number))
            if self.answers:
                self.attempts.settle(acks, durable=True)

    def count(self, name: str) -> int:
        return token_count(self.stored.get(name, b""))

    def has_stored(self, tokens: int) -> bool:
        return all(self.count(name) == tokens for name in self.core.made)

    def ids(self, name: str) -> list[int]:
        found: list[int] = unpack_tokens(self.stored[name])["id"].tolist()
        return found


@asynccontextmanager
async def stand(model: Path, flush_s: float = 0.05) -> AsyncIterator[Stand]:
    made = Stand(model, flush_s)
    tasks = [
        asyncio.create_task(made.store()),
        asyncio.create_task(throttle(made.engine, made.outbox, made.attempts)),
    ]
    try:
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await made.attempts.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        made.engine._llm.shutdown()


async def test_the_first_token_comes_at_once_and_later_ones_together(model: Path) -> None:
    async with stand(model, flush_s=60.0) as worker:
        await worker.start("a")
        seen = []
        for _ in range(1 + 2 * INTERVAL):
            await worker.steps(1)
            seen.append(worker.attempts.tokens)
        assert seen == [1] * INTERVAL + [1 + INTERVAL] * INTERVAL + [1 + 2 * INTERVAL]


async def test_tokens_of_a_slow_engine_are_stored_within_the_flush_interval(model: Path) -> None:
    async with stand(model) as worker:
        await worker.start("a", "b")
        for made in range(1, 5):
            await worker.steps(1)
            await wait_until(partial(worker.has_stored, made), timeout=2.0)
        assert worker.ids("a") == worker.ids("b") == [2, 3, 4, 5]
        assert unpack_tokens(worker.stored["a"])["version"].tolist() == [1] * 4


@pytest.mark.parametrize("silent_after", [0, 1, 5, 9, 20])
async def test_a_killed_worker_loses_no_more_than_its_flush_window(model: Path, silent_after: int) -> None:
    """The store hangs at some time, and the engine makes tokens as fast as it may: at no moment does the store lack
    more than a window of what the core has made."""
    async with stand(model, flush_s=0.01) as worker:
        await worker.start("a", "b", "c")
        await worker.steps(silent_after)
        worker.answers, acknowledged = False, {name: worker.count(name) for name in "abc"}
        for _ in range(100):
            await worker.steps(1)
            for name in "abc":
                assert worker.core.made[name] - acknowledged[name] <= WINDOW
        assert worker.core.paused, "the engine waits for the store"
        assert all(worker.core.made[name] - acknowledged[name] > WINDOW // 2 for name in "abc")


async def test_a_hand_over_stores_every_token_that_was_made(model: Path) -> None:
    async with stand(model, flush_s=60.0) as worker:
        await worker.start("a", "b")
        await worker.steps(1 + INTERVAL + 5)
        await worker.attempts.hand_over(LEFT, patience_s=5.0)
        await wait_until(lambda: sorted(worker.released) == ["a", "b"])
        assert worker.count("a") == worker.count("b") == 1 + INTERVAL + 5


@pytest.mark.parametrize("held", [False, True], ids=["running", "held"])
async def test_a_released_attempt_takes_its_tokens_along(model: Path, held: bool) -> None:
    async with stand(model, flush_s=60.0) as worker:
        await worker.start("a", "b")
        await worker.steps(4)
        if held:
            worker.attempts.holds.begin("install")
        worker.attempts.release([AttemptRef("run", "a", "a")], LEFT)
        await wait_until(lambda: worker.released == ["a"])
        assert worker.ids("a") == [2, 3, 4, 5]
        await worker.steps(1)
        assert worker.attempts.running == 1, "the other one goes on"


@pytest.mark.parametrize("options", [{"interactive": True}, {"stop": ("zzz",)}], ids=["interactive", "stop string"])
async def test_tokens_that_somebody_waits_for_come_singly(
    model: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    async with stand(model, flush_s=60.0) as worker:
        monkeypatch.setattr(worker.engine, "decode", lambda ids: "a" * len(ids))
        await worker.start("a", **options)
        for made in range(1, 6):
            await worker.steps(1)
            assert worker.attempts.tokens == made


async def test_tokens_of_an_engine_that_dies_are_still_handed_over(model: Path) -> None:
    async with stand(model, flush_s=60.0) as worker:
        await worker.start("a", "b")
        await worker.steps(1 + INTERVAL + 3)
        worker.core.step()
        worker.core.die()
        await wait_until(lambda: len(worker.released) == 2)
        assert worker.ids("a") == worker.ids("b") == list(range(2, 2 + 1 + INTERVAL + 4))
        assert worker.failures
        assert all(isinstance(error, EngineFailed) for error in worker.failures)


@pytest.mark.parametrize(
    ("change", "expected"),
    [({}, 8), ({"flush_tokens": 16}, 4), ({"flush_tokens": 3}, 1), ({"engine": "own:make"}, 1)],
    ids=["default", "a smaller window", "a tiny window", "another engine"],
)
def test_no_more_than_a_quarter_of_the_window_is_held_back(change: dict[str, Any], expected: int) -> None:
    assert WorkerSettings(**change).stream_interval == expected
