"""The simulated engine schedules as vLLM does: the same steps, the same tokens, the same preemptions in their order."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from ebbtide.simulator.engines.engine_profile import EngineProfile, KvCapacity, StepCosts
from ebbtide.simulator.engines.simulated_engine import EngineEventKind, SimulatedEngine
from tests.e2e.facts import facts_of

BLOCKS, BLOCK, BATCHED_TOKENS, SLOTS = 60, 32, 128, 16
Request = tuple[list[int], int]


def requests(seed: int, group: int) -> list[Request]:
    """Groups with one prompt each, and responses of all lengths."""
    draw, found = Random(seed), list[Request]()
    for _ in range(48 // group):
        prompt = [draw.randrange(100) for _ in range(draw.randrange(5, 200))]
        found += [(prompt, draw.randrange(10, 250)) for _ in range(group)]
    return found


def simulated(work: list[Request], group: int) -> tuple[int, int, list[int]]:
    profile = EngineProfile(
        name="schedule",
        model="none",
        device="none",
        gpus=0,
        source="made up",
        costs=StepCosts(base_s=1.0),
        kv=KvCapacity(tokens=(BLOCKS - 1) * BLOCK, block=BLOCK),  # vLLM keeps one block for itself
        batched_tokens=BATCHED_TOKENS,
    )
    engine = SimulatedEngine(profile, slots=SLOTS, now=0.0)
    engine.hold(0.0)  # all are there before the first step
    for number, (prompt, length) in enumerate(work):
        engine.admit(str(number), prompt=len(prompt), made=0, length=length, now=0.0, prefix=f"group {number // group}")
    engine.go_on(0.0)
    events = engine.advance(1e9)
    preempted = [int(event.key) for event in events if event.kind is EngineEventKind.PREEMPTED]
    # The first token of each reading comes without a step of its own.
    readings = len(work) + len(preempted)
    return round(engine.busy_s), engine.read + engine.generated - readings, preempted


@pytest.mark.nightly  # it changes with vLLM alone: tests/unit/simulator has a loop that schedules the same way
@pytest.mark.timeout(300)
def test_steps_tokens_and_preemptions_are_vllms(make_checkpoint: Callable[..., Path]) -> None:
    cases = [(1, 1), (2, 4), (3, 8)]
    work = [requests(seed, group) for seed, group in cases]
    found = facts_of("schedule_facts", make_checkpoint(1), BLOCKS, BLOCK, BATCHED_TOKENS, told=work)
    for (_, group), asked, facts in zip(cases, work, found["done"], strict=True):
        assert facts["lengths"] == [length for _, length in asked]
        steps, tokens, preempted = simulated(asked, group)
        assert preempted == facts["preempted"]
        assert len(preempted) > 5
        assert steps == facts["steps"]
        # Readings that were themselves preempted had no first token.
        assert tokens <= facts["tokens"] <= tokens + len(preempted)
