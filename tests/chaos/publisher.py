"""A trainer that publishes one version and ends: a process to be killed in the middle of it."""

import argparse
import asyncio

from ebbtide.client import Client
from tests.chaos.load import RUN
from tests.chaos.versions import Weights


async def work(coordinator: str, relay: str, step: int) -> None:
    async with Client(coordinator, relay) as client, client.claim(RUN, holder="publisher") as lease:
        await lease.publish(Weights(step).tensors(), step=step)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("coordinator")
    parser.add_argument("relay")
    parser.add_argument("step", type=int)
    options = parser.parse_args()
    asyncio.run(work(options.coordinator, options.relay, options.step))


if __name__ == "__main__":
    main()
