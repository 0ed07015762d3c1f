"""The process of the feed's workers: those of the control plane's benchmark, which want their siblings' tokens.

{"do": "fed"}   siblings' tokens that came, since the start
"""

import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvloop

from benchmarks.control_plane.fleet import Fleet, serve
from benchmarks.control_plane.worker import Worker
from ebbtide.rollout_worker.streams.sibling_client import CAPABILITY
from ebbtide.v1 import fleet_pb2


class DraftingWorker(Worker):
    """Counts what it is fed, and makes nothing of it."""

    fed = 0

    def _attach(self) -> fleet_pb2.WorkerMessage:
        message = super()._attach()
        message.attach.capabilities.append(CAPABILITY)
        return message

    async def _read_append(self, call: Any) -> None:
        await super()._read_append(self._counted(call))

    async def _counted(self, call: Any) -> AsyncIterator[fleet_pb2.AppendResponse]:
        async for answer in call:
            self.fed += sum(answer.siblings.counts)
            yield answer


class DraftingFleet(Fleet):
    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._drafting: list[DraftingWorker] = []

    def _made(self, name: str, slots: int) -> Worker:
        self._drafting.append(DraftingWorker(self, name, self._address, self._token, slots))
        return self._drafting[-1]

    def fed(self) -> dict[str, Any]:
        return {"fed": sum(one.fed for one in self._drafting)}

    def orders(self) -> dict[str, Callable[..., Any]]:
        return super().orders() | {"fed": self.fed}


if __name__ == "__main__":

    async def main() -> None:
        await serve(DraftingFleet(sys.argv[1]))

    uvloop.run(main())
