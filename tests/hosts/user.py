"""`python -m tests.hosts.user RUN SPEC.json`: a user's program, which knows the SDK and where the cluster is. It
submits a run, follows it to its end, and writes each event as a line of JSON; the last line is the run as it ended."""

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ebbtide.client import Client


async def main(run_id: str, spec: Mapping[str, Any]) -> None:
    async with Client(patience_s=120.0) as client:
        await client.submit(spec, run_id)
        async for event in client.watch(run_id):
            print(msgspec.json.encode(event).decode(), flush=True)  # noqa: T201 - who started this reads it
        print(msgspec.json.encode(await client.run(run_id)).decode(), flush=True)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text())))
