"""`nsenter --net=HOST python long_link.py HUB_NAMESPACE NAME LATENCY_S LOSS`: a cable with latency that loses packets.

One end is the interface `eth0` of the namespace that it is started in, the other the interface NAME of the hub's. What
goes in at one comes out at the other `LATENCY_S` later, or never: of LOSS packets the share, each way. The kernel of
the test machines cannot do it (no netem); TCP above it retransmits and slows down as it does on a real line.
"""

import contextlib
import ctypes
import fcntl
import os
import random
import selectors
import struct
import sys
import time
from collections import deque
from typing import Final

_TUNSETIFF: Final = 0x400454CA
_TAP_WITHOUT_HEADER: Final = 0x0002 | 0x1000
_CLONE_NEWNET: Final = 0x40000000
_FRAME: Final = 1 << 16
#: Of a router's queue, each way.
_MOST: Final = 4096


def open_tap(name: str) -> int:
    """A new interface of the current namespace, which lives as long as this descriptor."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
    return tap


def enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(namespace, os.O_RDONLY)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(descriptor)


def carry(ends: tuple[int, int], latency_s: float, loss: float) -> None:
    """For ever."""
    chance = random.Random(0)
    under_way: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}
    selector = selectors.DefaultSelector()
    for end, other in (ends, ends[::-1]):
        selector.register(end, selectors.EVENT_READ, other)
    while True:
        dues = [queue[0][0] for queue in under_way.values() if queue]
        for key, _ in selector.select(max(0.0, min(dues) - time.monotonic()) if dues else None):
            frame = receive(key.fd)
            queue = under_way[key.data]
            if frame and chance.random() >= loss and len(queue) < _MOST:
                queue.append((time.monotonic() + latency_s, frame))
        now = time.monotonic()
        for end, queue in under_way.items():
            while queue and queue[0][0] <= now:
                send(end, queue.popleft()[1])


def receive(end: int) -> bytes:
    try:
        return os.read(end, _FRAME)
    except OSError:
        return b""  # the interface is down


def send(end: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # the interface is down or its queue is full: the packet is lost
        os.write(end, frame)


def main() -> None:
    hub, name, latency_s, loss = sys.argv[1:]
    near = open_tap("eth0")
    enter(hub)
    far = open_tap(name)
    sys.stdout.write("READY\n")
    sys.stdout.flush()
    carry((near, far), float(latency_s), float(loss))


if __name__ == "__main__":
    main()
