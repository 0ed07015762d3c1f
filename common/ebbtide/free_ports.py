"""Finds ports for programs that must be told theirs before they start."""

import random
import socket
from pathlib import Path
from typing import Final

#: The kernel gives connections ports of this range, so a port in it may be taken before its program has started.
_EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST: Final = 12_000
_TRIES: Final = 100


def free_port(host: str = "127.0.0.1") -> int:
    """A port at `host` that no process listens on now. It is below the ports that the kernel gives away by itself, so
    it stays free for seconds. Raises `OSError` if `host` is no address of this machine, or if no port is free.
    """
    end = max(_LOWEST + 1, int(_EPHEMERAL.read_text().split()[0]))
    for port in (*random.sample(range(_LOWEST, end), min(_TRIES, end - _LOWEST)), 0):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                if not port:
                    raise
                continue
            found: int = probe.getsockname()[1]
            return found
    raise AssertionError
