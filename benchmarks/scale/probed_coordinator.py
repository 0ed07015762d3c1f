"""A coordinator whose loop is measured: `python -m benchmarks.scale.probed_coordinator` takes the coordinator's flags.

It answers questions on the unix socket that EBBTIDE_PROBE names, one JSON line each: "read" (what was seen, which
begins anew then) and "memory" (bytes in use). The coordinator's code is that of the checkout which comes first on
PYTHONPATH.
"""

import asyncio
import json
import os
from typing import Any, Final

import uvloop

from benchmarks.scale.loop_probe import LoopProbe, bytes_in_use, probed_loop
from ebbtide.coordinator.__main__ import main
from ebbtide.coordinator.dispatcher.rebalancer import Rebalancer

#: Methods that balance the fleet: together they may take a tenth of a core.
_BALANCING: Final = ("due", "_observe_all", "_begin_round", "decide")
_PROBE: Final = LoopProbe()
_TASKS: Final[list[asyncio.Task[None]]] = []


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while question := await reader.readline():
        found: dict[str, Any] = {"bytes": bytes_in_use()} if question == b"memory\n" else _PROBE.read()
        writer.write(json.dumps(found).encode() + b"\n")
        await writer.drain()
        _PROBE.reset()
        _PROBE.mute()
    writer.close()


def _new_loop() -> Any:
    loop = probed_loop(_PROBE)

    async def listen() -> None:
        server = await asyncio.start_unix_server(_answer, os.environ["EBBTIDE_PROBE"])
        await server.serve_forever()

    loop.call_soon(lambda: _TASKS.append(loop.create_task(listen())))
    return loop


if __name__ == "__main__":
    for _name in _BALANCING:
        if function := getattr(Rebalancer, _name, None):
            setattr(Rebalancer, _name, _PROBE.timed("balancing", function))
    _PROBE.watch_collector()
    uvloop.new_event_loop = _new_loop
    main()
