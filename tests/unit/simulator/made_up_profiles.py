"""Profiles with round numbers."""

from ebbtide.simulator.engines.engine_profile import EngineProfile, KvCapacity, StepCosts


def engine_profile(
    *, costs: StepCosts | None = None, tokens: int = 1 << 20, block: int = 16, batched: int = 8192, **kv: bool
) -> EngineProfile:
    """Without `costs` each step takes a quarter of a second."""
    return EngineProfile(
        name="made-up",
        model="none",
        device="none",
        gpus=1,
        source="made up",
        costs=costs or StepCosts(base_s=0.25),
        kv=KvCapacity(tokens=tokens, block=block, **kv),
        batched_tokens=batched,
    )
