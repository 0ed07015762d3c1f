"""What an engine says that was booted from a checkpoint, as JSON on stdout: in a process of its own, for the engine's
are forked from it.

Arguments: the checkpoint, and how many tokens. On stdin, as JSON: the prompts.
"""

import asyncio
import json
import sys

from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine
from tests.e2e.engine_facts import SETTINGS, Asker


async def main(checkpoint: str, length: str) -> None:
    engine = VllmEngine(checkpoint, 16, SETTINGS)
    try:
        await engine.start()
        said = await Asker(engine).ask_all(json.load(sys.stdin), max_tokens=int(length))
        print(json.dumps(said))  # noqa: T201 - the test reads it
    finally:
        await engine.stop()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
