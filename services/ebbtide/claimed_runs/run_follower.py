"""What a run's events have said so far, kept for those who work on the run.

Invariant: the fields are what the events up to the last one read say, in order. Rebuilt from the first event whenever a
process starts.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

from ebbtide.client import Client, Lease
from ebbtide.scheduling.steps.step_pacing import first_announced
from ebbtide.types.ids import new_fence
from ebbtide.types.run import RunEvent, RunStatus
from ebbtide.types.weights import PolicyVersion

#: A group that came to nothing. Said before its episodes are dropped, so that no trainer waits for it.
GROUP_DROPPED: Final = "group_dropped"
#: A checkpoint is durable. Said before what it holds is committed, so that none of it can be had again.
CHECKPOINT: Final = "checkpoint"
#: A driver or a trainer has taken up the run.
ATTACHED: Final = "attached"


class RunFollower:
    """Reads a run's events. `versions`: step -> the version first announced for it; `steps`: version -> its step;
    `evaluated`: steps whose evaluation was reported; `dropped`: step -> how many of its groups came to nothing;
    `checkpoints`: step -> path."""

    def __init__(self, client: Client, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        self._changed = asyncio.Condition()
        self._attached: set[str] = set()
        self.versions: dict[int, int] = {}
        self.steps: dict[int, int] = {}
        self.evaluated: set[int] = set()
        self.dropped: Counter[int] = Counter()
        self.checkpoints: dict[int, str] = {}

    async def run(self) -> RunStatus:
        """Follows until the run has ended, and returns how."""
        async for event in self._client.watch(self._run_id):
            self._take(event)
            await self.notify()
        return (await self._client.run(self._run_id)).status

    async def catch_up(self, lease: Lease) -> None:
        """Report that the lease's holder is here and wait for that to come back: all said before has been read then."""
        key = new_fence()
        await lease.report([RunEvent(kind=ATTACHED, key=key, message=f"a {lease.role} works on the run")])
        await self.until(lambda: key in self._attached)

    async def notify(self) -> None:
        """Have those who wait look again: something else that their predicates ask about has changed."""
        async with self._changed:
            self._changed.notify_all()

    def announced(self, version: PolicyVersion) -> None:
        """Take in at once what the holder announced itself; the event follows."""
        self.steps[version.version] = version.step
        self.versions = dict(first_announced(self.versions, (version.version, version.step)))

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait until `predicate` holds of what was read."""
        async with self._changed:
            await self._changed.wait_for(predicate)

    def _take(self, event: RunEvent) -> None:
        if event.kind == "version":
            number, step = int(event.values["version"]), int(event.values["step"])
            self.announced(PolicyVersion(policy="", version=number, step=step))
        elif event.kind == "evaluation":
            self.evaluated.add(int(event.values["step"]))
        elif event.kind == GROUP_DROPPED:
            self.dropped[int(event.values["step"])] += 1
        elif event.kind == CHECKPOINT:
            self.checkpoints[int(event.values["step"])] = event.labels["path"]
        elif event.kind == ATTACHED:
            self._attached.add(event.key)
