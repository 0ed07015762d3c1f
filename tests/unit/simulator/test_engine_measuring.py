"""Measuring an engine finds the costs that it has."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from ebbtide.profiling.engine_measuring import EngineMeasuring, plan_blocks
from ebbtide.profiling.profile_fits import fit_step_costs
from ebbtide.rollout_worker.engine import EngineCapacity, EngineRequest, TokenDelta
from ebbtide.simulator.engines.engine_profile import StepCosts
from ebbtide.types.rollout import FinishReason
from tests.fakes.instant_loop import InstantLoop
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.scripted_settings import ScriptedSettings

CAPACITY = EngineCapacity(
    kv_tokens=20_000, kv_block=16, batched_tokens=256, sequences=12, prefix_cache=True, whole_prompt_fits=True
)


class Sequence:
    def __init__(self, request: EngineRequest) -> None:
        self.unread, self.read, self.made, self.length = len(request.token_ids), 0, 0, request.max_tokens
        self.deltas: asyncio.Queue[TokenDelta] = asyncio.Queue()


class CostedEngine(ScriptedEngine):
    """Batches continuously, in steps that take what given costs say."""

    def __init__(self, costs: StepCosts) -> None:
        super().__init__(ScriptedSettings(max_model_len=800))
        self._costs = costs
        self._held: list[Sequence] = []
        self._loop_task: asyncio.Task[None] | None = None
        self.versions: list[int] = []

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        sequence = Sequence(request)
        self._held.append(sequence)
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.create_task(self._compute())
        try:
            finish = None
            while finish is None:
                delta = await sequence.deltas.get()
                finish = delta.finish
                yield delta
        finally:
            if sequence in self._held:
                self._held.remove(sequence)

    async def _compute(self) -> None:
        while self._held:
            room = CAPACITY.batched_tokens
            decoding = [one for one in self._held if not one.unread]
            room -= len(decoding)
            context, prefill, pairs = sum(one.read + one.made for one in decoding), 0, 0
            ready = list(decoding)
            for one in [one for one in self._held if one.unread]:
                part = min(room, one.unread)
                pairs += part * one.read + part * (part + 1) // 2
                one.read, one.unread, room, prefill = one.read + part, one.unread - part, room - part, prefill + part
                ready += [] if one.unread else [one]
            await asyncio.sleep(self._costs.step_s(batch=len(decoding), context=context, prefill=prefill, pairs=pairs))
            for one in ready:
                one.made += 1
                finish = FinishReason.LENGTH if one.made >= one.length else None
                one.deltas.put_nowait(TokenDelta([0], [0.0], [0], finish))
                if finish and one in self._held:
                    self._held.remove(one)

    async def install(self, version: int, weights: Path, changes: Path | None = None) -> float:
        self.versions.append(version)
        return 0.125


def measured(costs: StepCosts, seconds: float) -> EngineMeasuring:
    async def run() -> EngineMeasuring:
        engine = CostedEngine(costs)
        info = await engine.start()
        found = EngineMeasuring(engine, info, CAPACITY, lambda _: None)
        await found.run(seconds=seconds, weights=Path("weights"))
        assert engine.versions == list(range(1, len(found.pauses) + 1))
        return found

    with asyncio.Runner(loop_factory=InstantLoop) as runner:
        return runner.run(run())


def test_the_costs_of_an_engine_are_found() -> None:
    costs = StepCosts(base_s=0.004, token_s=2e-5, sequence_s=1e-4, context_s=3e-6, pair_s=2e-7)
    found = measured(costs, seconds=25.0)
    fitted, errors = fit_step_costs(found.steps)
    for name in ("base_s", "token_s", "sequence_s", "context_s", "pair_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(costs, name), rel=0.05), name
    assert (errors.observations, errors.worst < 0.02) == (len(found.steps), True)
    assert found.pauses
    assert set(found.pauses) == {0.125}


def test_measuring_ends_in_its_time() -> None:
    async def run() -> float:
        engine = CostedEngine(StepCosts(base_s=0.05))
        found = EngineMeasuring(engine, await engine.start(), CAPACITY, lambda _: None)
        await found.run(seconds=10.0, weights=None)
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=InstantLoop) as runner:
        assert 10.0 <= runner.run(run()) < 20.0  # a block that has begun is ended


def test_blocks_fit_into_memory_and_the_longest_response() -> None:
    for kv_tokens in (600, 3000, 20_000, 1 << 20):
        capacity = EngineCapacity(
            kv_tokens=kv_tokens, kv_block=16, batched_tokens=64, sequences=40, prefix_cache=True, whole_prompt_fits=True
        )
        blocks = plan_blocks(capacity, 500)
        assert all(block.batch * block.prompt + block.read < kv_tokens for block in blocks)
        assert all(block.prompt < 500 for block in blocks)
    assert {block.batch for block in blocks} == {1, 2, 4, 8, 16, 32, 40}
