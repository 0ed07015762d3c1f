"""Runs the guard: one mode, chosen by who owns the device, alone in its folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ebbtide.grants import locked_folder
from ebbtide.runtime import Shutdown
from ebbtide.serving_guard.settings import GuardSettings


class Mode(Protocol):
    """Lends one kind of owner's device. It is started once."""

    @property
    def address(self) -> str:
        """Where those connect whom this mode serves first."""
        ...

    async def start(self, shutdown: Shutdown) -> None: ...

    async def stop(self) -> None:
        """End grants first, so that the owner has its device to itself."""
        ...


def mode_of(settings: GuardSettings) -> Mode:
    """The mode of the owner that the settings name. Each is imported alone, with its own metrics."""
    if settings.owner == "trainer":
        from ebbtide.serving_guard.trainer_mode import TrainerMode

        return TrainerMode(settings)
    from ebbtide.serving_guard.server_mode import ServerMode

    return ServerMode(settings)


async def serve(shutdown: Shutdown, settings: GuardSettings, makes: Callable[[GuardSettings], Mode] = mode_of) -> None:
    """Lend one device until `shutdown` is requested."""
    settings.checked()
    with locked_folder(Path(settings.grant_dir)):
        mode = makes(settings)
        await mode.start(shutdown)
        shutdown.ready(mode.address)
        await shutdown.requested.wait()
        await mode.stop()
