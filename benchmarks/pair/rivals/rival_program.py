"""A rival as a program: our guard's process with somebody else's decisions in it."""

from collections.abc import Callable, Sequence
from functools import partial

from ebbtide.runtime import Shutdown, run
from ebbtide.serving_guard.governor.budget_decider import BudgetDecider, LatencyTargets, StepLimits
from ebbtide.serving_guard.memory_budget import MemoryBudget
from ebbtide.serving_guard.settings import GuardSettings
from ebbtide.settings import load


def run_rival(
    decides: Callable[[LatencyTargets, StepLimits], BudgetDecider],
    memory: Callable[..., MemoryBudget],
    description: str,
    argv: Sequence[str] | None = None,
) -> None:
    """Takes the guard's own flags."""
    settings = load(GuardSettings, prog="ebbtide serve serving-guard", argv=argv, description=description)

    async def work(shutdown: Shutdown) -> None:
        from ebbtide.serving_guard.server_lender import ServerLender
        from ebbtide.serving_guard.service import serve

        await serve(shutdown, settings, partial(ServerLender, decides=decides, memory=memory))

    run(work, "serving-guard", settings)
