"""Starts the coordinator, as leader or standby."""

import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ebbtide.runtime import Shutdown, race, run
from ebbtide.settings import load

if TYPE_CHECKING:  # nothing that imports gRPC may be imported before `main` has set its experiments
    from ebbtide.coordinator.service import Coordinator
    from ebbtide.coordinator.settings import CoordinatorSettings
    from ebbtide.rpc.server import Server

#: Workers' messages have some kilobytes, drivers' 4 MiB at most: a quarter of one in flight is enough on any link.
_WINDOW_BYTES: Final = 1 << 20
#: How long open calls may take at the end.
_GRACE_S: Final = 5.0
#: gRPC's newer listener hands each message from thread to thread: a message of a stream costs up to a third more CPU.
_GRPC_EXPERIMENTS: Final = "-event_engine_listener"


def main(argv: Sequence[str] | None = None) -> None:
    """Keep runs and rollouts, and assign rollouts to workers, until told to end."""
    os.environ.setdefault("GRPC_EXPERIMENTS", _GRPC_EXPERIMENTS)  # gRPC reads it as it is imported
    from ebbtide.coordinator.settings import CoordinatorSettings

    settings = load(CoordinatorSettings, prog="ebbtide serve coordinator", argv=argv, description=main.__doc__ or "")
    run(lambda shutdown: serve(settings, shutdown), "coordinator", settings)


async def serve(settings: "CoordinatorSettings", shutdown: Shutdown) -> None:
    from ebbtide.coordinator.service import Coordinator
    from ebbtide.errors import StandingBy
    from ebbtide.gc_pauses import age_objects
    from ebbtide.rpc.server import Server
    from ebbtide.telemetry import rpc_observer

    shutdown.spawn(age_objects(), "garbage")
    coordinator = Coordinator(settings)
    try:
        server = Server(
            settings.server,
            coordinator.services,
            observe=rpc_observer(),
            window_bytes=_WINDOW_BYTES,
            calls_per_user=settings.calls_per_user,
        )
        server.closed = StandingBy("this coordinator does not lead yet; try again")
        # Before taking the store over: a start that fails must not end the coordinator that serves.
        await server.start()
        if settings.standby:
            shutdown.ready(server.address)

        def heard(leader: str) -> None:
            server.closed = StandingBy(f"this coordinator stands by; the one at {leader} leads")

        opening = asyncio.create_task(coordinator.open(server.address, heard=heard))
        if not await race(opening, shutdown.requested.wait()):
            await _lead(settings, shutdown, coordinator, server)
        await server.stop(0.0 if server.closed else _GRACE_S)  # a standby has no calls to finish
        await coordinator.settle()
        await coordinator.leading.release()
    finally:
        await coordinator.close()


async def _lead(
    settings: "CoordinatorSettings", shutdown: Shutdown, coordinator: "Coordinator", server: "Server"
) -> None:
    """Serve until asked to end, or superseded."""
    loops = [shutdown.spawn(loop, name) for name, loop in coordinator.loops(server.set_serving).items()]
    server.closed = None
    await server.set_serving(True)
    if not settings.standby:
        shutdown.ready(server.address)
    await shutdown.requested.wait()
    coordinator.leave()
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)


if __name__ == "__main__":
    main()
