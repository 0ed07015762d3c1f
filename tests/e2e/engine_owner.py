"""Runs a serving engine as benchmarks and demos do, and never ends it: `python -m tests.e2e.engine_owner FOLDER`."""

import asyncio
import sys
from pathlib import Path

from ebbtide.local_cluster.launcher import ProgramProcess
from ebbtide.local_cluster.local_cluster import free_address
from ebbtide.local_cluster.serving_checkpoint import ServedNetwork, served_model
from ebbtide.local_cluster.serving_engine import serving_engine

_NETWORK = ServedNetwork(hidden=256, layers=2, heads=4, kv_heads=4, feed_forward=256)


async def main() -> None:
    folder = Path(sys.argv[1])
    checkpoint, log = served_model(folder, _NETWORK), folder / "serving.log"
    program = serving_engine(checkpoint, "served", free_address(), log, threads=1, kv_mib=64, dtype="float32")
    process = ProgramProcess(program)
    sys.stdout.write(f"{process.pid}\n")
    sys.stdout.flush()
    await process.wait_ready()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
