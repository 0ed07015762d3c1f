"""A rival as a program: our guard's process with somebody else's decisions in it."""

from collections.abc import Callable, Sequence

from ebbtide.runtime import Shutdown, run
from ebbtide.scheduling.governor import Decides, Limits, Targets
from ebbtide.serving_guard.memory import Memory
from ebbtide.serving_guard.settings import GuardSettings
from ebbtide.settings import load


def run_rival(
    decides: Callable[[Targets, Limits], Decides],
    memory: Callable[..., Memory],
    description: str,
    argv: Sequence[str] | None = None,
) -> None:
    """Takes the guard's own flags."""
    settings = load(GuardSettings, prog="ebbtide serving-guard", argv=argv, description=description)

    async def work(shutdown: Shutdown) -> None:
        from ebbtide.serving_guard.service import serve

        await serve(shutdown, settings, decides=decides, memory=memory)

    run(work, "serving-guard", settings)
