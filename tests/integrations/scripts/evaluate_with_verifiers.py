"""verifiers plays all tasks of an environment greedily by its eval client. Its argument is a plan; both are JSON."""

import asyncio
import json
import sys

from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

PLAN = json.loads(sys.argv[1])


async def main():
    config = {"taskset": {"id": "letters-game"}, "agent": {"runtime": {"type": "subprocess"}}}
    environment = load_environment(resolve_env_config(config))
    client = EvalClientConfig(base_url=PLAN["url"], api_key_var="GATEWAY_API_KEY")
    sampling = SamplingConfig(temperature=0.0, max_tokens=24)
    context = ModelContext(model=PLAN["model"], client=client, sampling=sampling)
    found = []
    async with environment.serving():
        for task in environment.taskset:
            (slot,) = environment.slots(task)
            episode = await environment.run_slot(slot, context)
            (trace,) = episode.traces
            assert episode.ok, episode.errors or trace.errors
            found.append([trace.reward, "|".join(one.content or "" for one in trace.assistant_messages)])
    sys.stdout.write(json.dumps(found) + "\n")


asyncio.run(main())
