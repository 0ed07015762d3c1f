"""A trainer as small as can be, in a process of its own: step by step it publishes a version and submits rollouts under
its lease, and waits until they are finished. Restarted, it begins at the first step again, which changes nothing.
"""

import argparse
import asyncio
import json
from pathlib import Path
from typing import Final

from ebbtide.client import Client, Lease
from ebbtide.errors import LeaseSuperseded
from ebbtide.types.rollout import RolloutRequest
from tests.chaos.load import RUN, make_requests, publish

STEPS: Final = 4
ROLLOUTS: Final = 24  # of each step
#: float32 elements of a version of 24 tiles.
LARGE: Final = 6 << 20
#: The status of one whose lease was taken by another.
SUPERSEDED: Final = 3


def all_requests() -> list[RolloutRequest]:
    """What every trainer submits."""
    return make_requests(0, STEPS * ROLLOUTS)


async def train(lease: Lease) -> None:
    finished: set[str] = set()
    finishes = lease.finished()
    for step in range(STEPS):
        await publish(lease, step=step, elements=LARGE)
        requests = all_requests()[step * ROLLOUTS : (step + 1) * ROLLOUTS]
        await lease.submit_rollouts(requests)
        while not finished.issuperset(request.rollout_id for request in requests):
            finished.add((await anext(finishes)).rollout_id)


async def work(coordinator: str, relay: str, holder: str) -> int:
    async with Client(coordinator, relay) as client, client.claim(RUN, holder=holder) as lease:
        try:
            await train(lease)
        except LeaseSuperseded:
            return SUPERSEDED
    return 0


def main() -> int:
    parser = argparse.ArgumentParser()
    for option in ("coordinator", "relay", "holder", "ready-file", "die-with-parent"):
        parser.add_argument(f"--{option}", required=True)
    options = parser.parse_args()
    fresh = Path(f"{options.ready_file}.new")
    fresh.write_text(json.dumps({"address": options.holder}))
    fresh.rename(options.ready_file)
    return asyncio.run(work(options.coordinator, options.relay, options.holder))


if __name__ == "__main__":
    raise SystemExit(main())
