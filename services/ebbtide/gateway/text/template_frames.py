"""Carries chat templates and what they made between the gateway and its template processes, as frames of msgpack."""

import socket
import struct
from typing import Final, TypeVar

import msgspec

_LENGTH: Final = struct.Struct("<I")
#: Bytes of one frame. The gateway's limit on bodies is far below.
_MAX_FRAME: Final = 256 << 20

_Message = TypeVar("_Message")


class TemplateJob(msgspec.Struct):
    """One rendering. `template` is empty if the process should have the template of that `key`.

    `variables` is a JSON object: it holds integers of any size, which models do write.
    """

    key: str
    template: str
    variables: str


class TemplateText(msgspec.Struct):
    """What came of it: `text`, or `error`, of which `broken` says that the template is to blame, not its variables.
    `unknown`: the process lacks the template.
    """

    text: str = ""
    error: str = ""
    broken: bool = False
    unknown: bool = False


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """Sends one frame. Raises `OSError`, and `ValueError` if it is too large."""
    body = msgspec.msgpack.encode(message)
    if len(body) > _MAX_FRAME:
        raise ValueError(f"a frame of {len(body)} bytes")
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive(connection: socket.socket, kind: type[_Message]) -> _Message:
    """Receives one frame. Raises `EOFError` once the other side closed, and `OSError`."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return msgspec.msgpack.decode(_exactly(connection, min(length, _MAX_FRAME)), type=kind)


def _exactly(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view, filled = memoryview(data), 0
    while filled < count:
        got = connection.recv_into(view[filled:])
        if not got:
            raise EOFError
        filled += got
    return data
