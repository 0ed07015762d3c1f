"""Runs the guard: one lender, chosen by who owns the device, alone in its folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ebbtide.errors import InvalidRequest
from ebbtide.grants import locked_folder
from ebbtide.runtime import Shutdown
from ebbtide.serving_guard.lender import RECORD, LeaseRecord
from ebbtide.serving_guard.settings import GuardSettings


class GuardLender(Protocol):
    """What a guard runs, started once."""

    @property
    def address(self) -> str: ...

    async def start(self, shutdown: Shutdown) -> None: ...

    async def stop(self) -> None: ...


def lender_of(settings: GuardSettings) -> GuardLender:
    """The lender for the owner that the settings name. Each is imported alone, with its own metrics."""
    if settings.owner == "turns":
        from ebbtide.serving_guard.turns_lender import TurnsLender

        return TurnsLender(settings)
    if settings.owner == "trainer":
        from ebbtide.serving_guard.trainer_lender import TrainerLender

        return TrainerLender(settings)
    from ebbtide.serving_guard.server_lender import ServerLender

    return ServerLender(settings)


async def serve(
    shutdown: Shutdown, settings: GuardSettings, makes: Callable[[GuardSettings], GuardLender] = lender_of
) -> None:
    """Lend one device until `shutdown` is requested. `makes`: the lender. Raises `InvalidRequest` naming `owner` if the
    device is a trainer's, and the settings do not say so."""
    settings.checked()
    folder = Path(settings.grant_dir)
    with locked_folder(folder):
        if settings.owner == "server" and LeaseRecord(folder).read():
            text = (
                "a trainer has owned this device since the host was started: set owner = trainer, or name another "
                f"folder (or remove {folder / RECORD}, if no trainer runs here any more)"
            )
            raise InvalidRequest(text, field="owner")
        lender = makes(settings)
        await lender.start(shutdown)
        shutdown.ready(lender.address)
        await shutdown.requested.wait()
        await lender.stop()
