"""`python -m tests.hosts.engine --port PORT --ready-file FILE --die-with-parent PID`: an engine that serves users on
its host's loopback. Each answer has twenty tokens, 10 ms apart."""

import argparse
import asyncio
import json
from pathlib import Path

from ebbtide.runtime import die_with_parent, write_atomically
from tests.integration.serving_guard.engine import ServingEngine


async def main(port: int, ready: Path) -> None:
    engine = ServingEngine()
    engine.tokens, engine.first_s, engine.gap_s = 20, 0.02, 0.01
    async with engine.at(port):
        write_atomically(ready, json.dumps({"address": engine.url}))
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ready-file", type=Path, required=True)
    parser.add_argument("--die-with-parent", type=int, required=True)
    given = parser.parse_args()
    die_with_parent(given.die_with_parent)
    asyncio.run(main(given.port, given.ready_file))
