"""A proxy in a process of its own, to be killed: `python guarding.py UPSTREAM LISTEN [FD]`.

With FD it takes that listening socket over from its parent as from systemd: as descriptor 3, under its own pid.
"""

import asyncio
import os
import sys

import uvloop

from ebbtide.serving_guard.proxy.proxy import Proxy
from ebbtide.serving_guard.settings import ProxySettings
from tests.integration.serving_guard.stand import Recorded


async def guard(upstream: str, listen: str) -> None:
    proxy = Proxy(ProxySettings(), upstream, Recorded(), listen)
    await proxy.start()
    print(proxy.address, flush=True)  # noqa: T201 - its parent waits for it
    await asyncio.Event().wait()


if __name__ == "__main__":
    if len(sys.argv) > 3:
        os.dup2(int(sys.argv[3]), 3)
        os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
    uvloop.run(guard(sys.argv[1], sys.argv[2]))
