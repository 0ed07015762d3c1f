"""Watches from outside who has the device, and whether its engine computes while the trainer has it."""

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.grants import Page, page_path, socket_path
from ebbtide.rpc.channel import open_socket
from ebbtide.rpc.status_table import translated
from ebbtide.types.grants import DeviceStatus
from ebbtide.v1.loans_pb2 import WatchDeviceRequest
from ebbtide.v1.loans_pb2_grpc import LoansStub
from ebbtide.wire import from_proto

#: Interval of looks.
_LOOK_S: Final = 0.05
#: States in which somebody may use the device.
_OWNED: Final = frozenset({"held", "lent", "abandoned"})


class DeviceWatch:
    """`run` has to run. `looks` counts the states that were seen. Times are of the wall clock: `both` has those of
    looks at which the trainer had the device and an engine computed, `unowned` those for which nobody could use it,
    from the last look before to the first one behind.
    """

    def __init__(self, folder: Path, worker_id: str) -> None:
        self._folder, self._worker_id = folder, worker_id
        self.looks = 0
        self.both = list[float]()
        self.unowned: list[tuple[float, float]] = []
        self._held = (0, 0.0), (0, 0)  # the newest spell in which steps were looked at, and what was found

    async def run(self) -> None:
        owned_at, owned = time.time(), True
        while True:
            status = await self._status()
            if status is None or status.state not in _OWNED:
                owned = False
            else:
                now = time.time()
                self.unowned += [] if owned else [(owned_at, now)]
                owned_at, owned = now, True
                self.looks += 1
                self.both += [now] if await self._computes_beside(status) else []
            await asyncio.sleep(_LOOK_S)

    async def _status(self) -> DeviceStatus | None:
        with suppress(EbbtideError):
            async with open_socket(socket_path(self._folder)) as channel:
                with translated("serving-guard", self._worker_id):
                    async for message in LoansStub(channel).WatchDevice(WatchDeviceRequest(), timeout=2.0):
                        return from_proto(message, DeviceStatus)
        return None

    async def _computes_beside(self, status: DeviceStatus) -> bool:
        """Whether an engine made steps since a former look, and the trainer had the device all the time."""
        if status.state != "held" or not status.compute_back:
            return False
        made, after = self.made(), await self._status()
        if after is None or after.state != "held" or _spell(after) != _spell(status):
            return False
        former, self._held = self._held, (_spell(status), made)
        # The first step is a boot's own: an engine warms up with one token, and needs no permission for that.
        return former[0] == _spell(status) and former[1][0] == made[0] and 0 < former[1][1] < made[1]

    def made(self) -> tuple[int, int]:
        """The engine's process, and the steps that it has made; 0, 0 without one."""
        try:
            page = Page(page_path(self._folder, self._worker_id))
        except InvalidRequest:
            return 0, 0
        try:
            steps = page.steps()
            return steps.pid, steps.steps
        finally:
            page.close()


def _spell(status: DeviceStatus) -> tuple[int, float]:
    """Names a time for which the trainer has the device: until it is lent again."""
    return status.take_backs, status.lent_s
