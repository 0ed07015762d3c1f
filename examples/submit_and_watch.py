"""Submit a run, follow it and say how it ended, with the SDK alone: python submit_and_watch.py RUN.toml

EBBTIDE_COORDINATOR (127.0.0.1:7600) and EBBTIDE_TOKEN say where the cluster is, and who asks.
"""

import asyncio
import sys

from ebbtide.client import Client


async def main() -> None:
    async with Client() as client:
        run = await client.submit(sys.argv[1])
        async for event in client.watch(run.run_id):
            print(run.run_id, event.kind, event.message, flush=True)  # noqa: T201
        print(run.run_id, (await client.run(run.run_id)).status.name)  # noqa: T201


asyncio.run(main())
