"""Asks a serving-guard for its state, over the socket that it shares with the workers beside it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from ebbtide.errors import Unavailable
from ebbtide.rpc.backoff import retrying
from ebbtide.rpc.channel import Channel, open_socket
from ebbtide.rpc.status_table import translated
from ebbtide.types.grants import GuardStatus
from ebbtide.v1.grants_pb2 import WatchGuardRequest
from ebbtide.v1.grants_pb2_grpc import GrantsStub
from ebbtide.wire.record_conversion import from_proto

#: A guard answers at once unless it is frozen.
_ANSWER_S: Final = 3.0


class GuardClient:
    """Made by `guard_client`."""

    def __init__(self, channel: Channel, socket: Path, patience_s: float) -> None:
        self._stub, self._socket, self._patience_s = GrantsStub(channel), socket, patience_s

    async def status(self) -> GuardStatus:
        """The guard's present state. Raises `Unavailable` if it stays unreachable for longer than the patience."""
        return await retrying(self._ask, patience_s=self._patience_s)

    async def _ask(self) -> GuardStatus:
        try:
            with translated("serving-guard"):
                async for message in self._stub.WatchGuard(WatchGuardRequest(), timeout=_ANSWER_S):
                    return from_proto(message, GuardStatus)
        except Unavailable:
            pass
        raise Unavailable(
            f"no guard answers at {self._socket}; start one (ebbtide serving-guard --grant-dir {self._socket.parent}), "
            "or name the folder of a running guard"
        )


@asynccontextmanager
async def guard_client(socket: Path, patience_s: float = 0.0) -> AsyncIterator[GuardClient]:
    async with open_socket(socket) as channel:
        yield GuardClient(channel, socket, patience_s)
