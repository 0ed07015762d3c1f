"""A trainer that publishes what it is told to, one version after another: a process to be killed in the middle of one.

Arguments: coordinator and relay. On stdin, a line each: [run, safetensors file] as JSON. On stdout, a line each: the
report of the version, once it is announced. It ends with its stdin.
"""

import asyncio
import json
import sys

import msgspec
from safetensors.numpy import load_file

from ebbtide.client import Client, Lease


async def work(coordinator: str, relay: str) -> None:
    lease: Lease | None = None
    async with Client(coordinator, relay) as client:
        while line := await asyncio.to_thread(sys.stdin.readline):
            run_id, path = json.loads(line)
            if lease is None or lease.run_id != run_id:
                if lease is not None:
                    await lease.release()
                lease = await client.acquire(run_id, holder="trainer")
            publishing = await lease.publishing(load_file(path), step=0)
            await publishing
            print(json.dumps(msgspec.to_builtins(publishing.report)), flush=True)  # noqa: T201 - the test reads it
        if lease is not None:
            await lease.release()


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:]))
