"""Starts the coordinator."""

import asyncio
from collections.abc import Sequence
from typing import Final

from ebbtide.coordinator.settings import Settings
from ebbtide.runtime import Shutdown, race, run
from ebbtide.settings import load

#: Workers' messages have some kilobytes, the largest of drivers 4 MiB: a quarter of one on its way is enough anywhere.
_WINDOW_BYTES: Final = 1 << 20


def main(argv: Sequence[str] | None = None) -> None:
    """Keep runs and rollouts, and say which worker generates what, until told to end."""
    settings = load(Settings, prog="ebbtide coordinator", argv=argv, description=main.__doc__ or "")
    run(lambda shutdown: serve(settings, shutdown), "coordinator", settings)


async def serve(settings: Settings, shutdown: Shutdown) -> None:
    from ebbtide.coordinator.service import Coordinator
    from ebbtide.rpc.server import Server, check_servable
    from ebbtide.telemetry import rpc_observer

    # Before it takes the store over: a start that fails must not end the coordinator that serves.
    check_servable(settings.server)
    coordinator = Coordinator(settings)
    try:
        opening = asyncio.create_task(coordinator.open())
        if await race(opening, shutdown.requested.wait()):
            return  # asked to end while it waited for the store
        server = Server(settings.server, opening.result(), observe=rpc_observer(), window_bytes=_WINDOW_BYTES)
        await server.start()
        for name, loop in coordinator.loops().items():
            shutdown.spawn(loop, name)
        await server.set_serving(True)
        shutdown.ready(server.address)
        await shutdown.requested.wait()
        coordinator.leave()
        await server.stop()
    finally:
        await coordinator.close()


if __name__ == "__main__":
    main()
