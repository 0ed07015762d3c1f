"""Opens the sockets that clients connect to: binds them, or takes them over from systemd.

A socket that systemd holds outlives the guard. While no guard runs, clients wait in its queue instead of being refused,
and the next guard takes the same socket (sd_listen_fds(3): from file descriptor 3 on, counted by LISTEN_FDS for the
process LISTEN_PID).
"""

import os
import socket
from typing import Final

from ebbtide.errors import InvalidRequest

_FIRST: Final = 3
#: Connections that wait to be accepted; the kernel applies its own bound if that is lower.
BACKLOG: Final = 1024


def sockets(listen: str) -> list[socket.socket]:
    """The sockets handed over by systemd, if any, else one bound to `listen` (HOST:PORT; port 0: any).

    Raises `InvalidRequest` naming `listen` or LISTEN_FDS.
    """
    return handed_over() or [bound(listen)]


def handed_over() -> list[socket.socket]:
    """The sockets that systemd passed to this process. Child processes inherit neither these nor the variables."""
    count, pid = os.environ.get("LISTEN_FDS", ""), os.environ.get("LISTEN_PID", "")
    if not count.isdecimal() or pid != str(os.getpid()):
        return []
    for name in ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"):
        os.environ.pop(name, None)
    return [_adopted(number) for number in range(_FIRST, _FIRST + int(count))]


def _adopted(number: int) -> socket.socket:
    try:
        os.set_inheritable(number, False)
        taken = socket.socket(fileno=number)
        listens = taken.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        message = f"file descriptor {number} is not a socket ({error.strerror})"
        raise InvalidRequest(message, field="LISTEN_FDS") from None
    if taken.type != socket.SOCK_STREAM or not listens or taken.family not in {socket.AF_INET, socket.AF_INET6}:
        raise InvalidRequest(f"file descriptor {number} is not a listening TCP socket", field="LISTEN_FDS")
    taken.setblocking(False)
    return taken


def bound(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidRequest(f"{listen!r} is not of the form HOST:PORT", field="listen")
    host = host.strip("[]")
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, int(port)))
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise InvalidRequest(f"cannot bind {listen} ({error.strerror or error})", field="listen") from None
    made.setblocking(False)
    return made


def address(taken: socket.socket) -> str:
    """HOST:PORT for clients."""
    host, port = taken.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
