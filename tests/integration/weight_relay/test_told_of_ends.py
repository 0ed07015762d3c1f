"""A relay hears which runs end from whichever coordinator leads."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from ebbtide.auth.security import ClientSecurity, ServerSettings
from ebbtide.rpc.server import Server
from ebbtide.v1 import runs_pb2_grpc, types_pb2
from ebbtide.weight_relay.service import WeightRelay
from ebbtide.weight_relay.settings import RelaySettings
from tests.support.waiting import wait_until


class Coordinator(runs_pb2_grpc.RunsServicer):
    """Says of one run that it has ended, and then nothing more, as one that is frozen."""

    def __init__(self, ended: str) -> None:
        self._ended = types_pb2.EndedRun(run_id=ended, status=types_pb2.RUN_STATUS_CANCELLED)
        services = [(runs_pb2_grpc.add_RunsServicer_to_server, self, "ebbtide.v1.Runs")]
        self.server = Server(ServerSettings(listen="127.0.0.1:0", token="t"), services)

    async def WatchEnded(
        self, request: types_pb2.WatchEndedRequest, context: object
    ) -> AsyncIterator[types_pb2.RunsEnded]:
        yield types_pb2.RunsEnded(ended=[self._ended])
        await asyncio.Event().wait()


async def test_a_relay_hears_of_ends_from_the_coordinator_that_takes_over_from_a_frozen_one(tmp_path: Path) -> None:
    two = Coordinator("before"), Coordinator("after")  # type: ignore[abstract]
    for one in two:
        await one.server.start()
    await two[0].server.set_serving(True)
    names = ",".join(one.server.address for one in two)
    settings = RelaySettings(data_dir=str(tmp_path), coordinator=names, coordinator_security=ClientSecurity(token="t"))
    relay = WeightRelay(settings)
    await relay.open()
    running = asyncio.create_task(relay.run())
    try:
        await wait_until(lambda: "before" in relay.ended)
        await two[1].server.set_serving(True)
        await wait_until(lambda: "after" in relay.ended)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await relay.close()
        for one in two:
            await one.server.stop(0.0)
