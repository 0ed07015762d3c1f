"""Follows a run's events for the trainer or driver that works on the run.

Invariant: the fields hold what the events read so far said, in order. Each process rebuilds them from the first event.
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

#: A group has no trajectories. Reported before its episodes are dropped, so that no trainer waits for it.
GROUP_DROPPED: Final = "group_dropped"
#: A checkpoint is durable. Reported before its trajectories are committed, which deletes them.
CHECKPOINT: Final = "checkpoint"
#: A step of rounds begins groups, or takes them. Reported before the groups are submitted, or completed.
ROUND_OPENED: Final = "round_opened"
ROUND_TAKEN: Final = "round_taken"
#: A driver or a trainer has taken up the run.
ATTACHED: Final = "attached"


class RunFollower:
    def __init__(self, client: Client, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        self._changed = asyncio.Condition()
        self._attached: set[str] = set()
        self.versions: dict[int, int] = {}  # step -> the version first announced for it
        self.steps: dict[int, int] = {}  # version -> its step
        self.evaluated: set[int] = set()  # steps whose evaluation was reported
        self.dropped: Counter[int] = Counter()  # step -> groups without trajectories
        self.checkpoints: dict[int, str] = {}  # step -> path
        self.begun: dict[int, int] = {}  # step of rounds -> groups that it and those before it began
        self.taken: dict[int, int] = {}  # group of rounds -> the step that trains on it

    async def run(self) -> RunStatus:
        """Follows the run to its end. Returns its final status."""
        async for event in self._client.watch(self._run_id):
            self._take(event)
            await self.notify()
        return (await self._client.run(self._run_id)).status

    async def catch_up(self, lease: Lease) -> None:
        """Reports an event and waits until it is read: all earlier events are read then."""
        key = new_fence()
        await lease.report([RunEvent(kind=ATTACHED, key=key, message=f"a {lease.role} works on the run")])
        await self.until(lambda: key in self._attached)

    async def notify(self) -> None:
        """Wakes the waiters, whose predicates may depend on more than events."""
        async with self._changed:
            self._changed.notify_all()

    def announced(self, version: PolicyVersion) -> None:
        """Takes in a version that the holder announced itself, before its event arrives."""
        self.steps[version.version] = version.step
        self.versions = dict(first_announced(self.versions, (version.version, version.step)))

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Waits until `predicate` holds."""
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
        elif event.kind == ROUND_OPENED:
            self.begun[int(event.values["step"])] = int(event.values["begun"])
        elif event.kind == ROUND_TAKEN:
            self.taken |= dict.fromkeys(map(int, event.labels["groups"].split()), int(event.values["step"]))
        elif event.kind == ATTACHED:
            self._attached.add(event.key)
