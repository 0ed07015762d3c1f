"""Starts the weight-relay."""

import asyncio
from collections.abc import Sequence

from ebbtide.runtime import Shutdown, run
from ebbtide.settings import load
from ebbtide.weight_relay.settings import RelaySettings


def main(argv: Sequence[str] | None = None) -> None:
    """Serve policy versions until told to end."""
    settings = load(RelaySettings, prog="ebbtide serve weight-relay", argv=argv, description=main.__doc__ or "")
    run(lambda shutdown: serve(settings, shutdown), "weight-relay", settings)


async def serve(settings: RelaySettings, shutdown: Shutdown) -> None:
    from ebbtide.rpc.server import Server
    from ebbtide.telemetry import rpc_observer
    from ebbtide.v1.weights_pb2_grpc import add_WeightsServicer_to_server
    from ebbtide.weight_relay.service import WeightRelay
    from ebbtide.weight_relay.servicer import SERVICE

    relay = WeightRelay(settings)
    services = [(add_WeightsServicer_to_server, relay.servicer, SERVICE)]
    server = Server(settings.server, services, observe=rpc_observer())
    await relay.open()
    running = shutdown.spawn(relay.run(), "relay")
    await server.start()
    await server.set_serving(True)
    shutdown.ready(server.address)
    await shutdown.requested.wait()
    await server.stop()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await relay.close()


if __name__ == "__main__":
    main()
