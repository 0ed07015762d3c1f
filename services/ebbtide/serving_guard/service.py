"""Runs the guard: one mode, chosen by who owns the device, alone in its folder."""

from collections.abc import Callable
from pathlib import Path

from ebbtide.grants import locked_folder
from ebbtide.runtime import Shutdown
from ebbtide.serving_guard.lender import Lender
from ebbtide.serving_guard.settings import GuardSettings


def mode_of(settings: GuardSettings) -> Lender:
    """The mode of the owner that the settings name. Each is imported alone, with its own metrics."""
    if settings.owner == "trainer":
        from ebbtide.serving_guard.trainer_mode import TrainerMode

        return TrainerMode(settings)
    from ebbtide.serving_guard.server_mode import ServerMode

    return ServerMode(settings)


async def serve(
    shutdown: Shutdown, settings: GuardSettings, makes: Callable[[GuardSettings], Lender] = mode_of
) -> None:
    """Lend one device until `shutdown` is requested. `makes`: the mode."""
    settings.checked()
    with locked_folder(Path(settings.grant_dir)):
        lender = makes(settings)
        await lender.start(shutdown)
        shutdown.ready(lender.address)
        await shutdown.requested.wait()
        await lender.stop()
