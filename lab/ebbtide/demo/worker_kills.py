"""Kills the demo's own programs in the middle of its run.

Invariant: each planned kill happens at most once, and is in `done` from then on.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from ebbtide.cli.views.run import RunProgress
from ebbtide.demo.demo_report import KillRecord
from ebbtide.demo.token_accounts import TRAINING_PREFIX, InFlightTokens
from ebbtide.local_cluster.local_cluster import LocalCluster

#: Shares of the run's steps after which each is killed.
_WORKER_AT, _COORDINATOR_AT, _TRAINER_AT = 0.35, 0.55, 0.75
#: A worker is killed while it generates so many rollouts (fewer if a step has few), each with so many tokens stored.
_ROLLOUTS: Final = 16
_STORED: Final = 8
#: Share of the mean response after which a rollout may end any moment.
_SHARE: Final = 0.7
_LOOK_S: Final = 0.02


class KillMoment(Struct, frozen=True, kw_only=True):
    """When a worker is killed: while it generates so many rollouts, each with so many tokens."""

    rollouts: int
    tokens: range
    prefix: str  # of the rollouts' ids


class WorkerKills:
    """Kills programs as planned; `notify` gets a line for each kill.

    `moment`: when to kill a worker; None: in the middle of a step's responses, of the length that they had so far.
    """

    def __init__(self, cluster: LocalCluster, notify: Callable[[str], None], moment: KillMoment | None = None) -> None:
        self._cluster = cluster
        self._notify = notify
        self._moment = moment
        self.done: list[KillRecord] = []

    async def run(self, progress: RunProgress, *, worker: bool, coordinator: bool, trainer: bool) -> None:
        """Carries out the planned kills, one after another."""
        if worker:
            await self._step(progress, _WORKER_AT)
            await self._kill_worker(progress)
        if coordinator:
            await self._step(progress, _COORDINATOR_AT)
            self._crash("coordinator", progress)
        if trainer:
            await self._step(progress, _TRAINER_AT)
            self._crash("trainer", progress)

    async def _step(self, progress: RunProgress, share: float) -> None:
        spec = progress.spec
        wanted = max(1, round(share * spec.trainer.steps)) if spec else 1
        await poll_until(lambda: max(progress.steps, default=0) >= wanted)

    async def _kill_worker(self, progress: RunProgress) -> None:
        """Kills the newest worker in the middle of its responses, and starts another in its place."""
        victim, moment = self._cluster.workers[-1], self._moment or self._middle(progress)
        flight = InFlightTokens(self._cluster.ledgers[victim], moment.prefix)
        generating = await poll_until(lambda: found if (found := flight.look(moment.tokens)) >= moment.rollouts else 0)
        self._cluster.launcher.kill(victim)
        self._record(victim, progress, generating)
        self._notify(f"{victim} is killed (SIGKILL) while it generates {generating} rollouts")
        replacement = await self._cluster.add_worker()
        self._notify(f"{replacement} takes the place of {victim}")

    def _middle(self, progress: RunProgress) -> KillMoment:
        batch = progress.spec.batch if progress.spec else None
        share = batch.groups_per_step * batch.group_size // len(self._cluster.workers) if batch else _ROLLOUTS
        tokens = _middle(progress, self._cluster.shape.flush_tokens)
        return KillMoment(rollouts=max(1, min(_ROLLOUTS, share // 2)), tokens=tokens, prefix=TRAINING_PREFIX)

    def _crash(self, program: str, progress: RunProgress) -> None:
        self._cluster.launcher.crash(program)
        self._record(program, progress)

    def _record(self, program: str, progress: RunProgress, generating: int = 0) -> None:
        at = max(progress.step_at_s.values(), default=0.0)
        self.done.append(KillRecord(program=program, at_s=at, step=max(progress.steps), generating=generating))


def _middle(progress: RunProgress, flush_tokens: int) -> range:
    """Token counts of a response in its middle: some tokens are surely stored, and its end is not near."""
    lengths = [values["response_length"] for values in progress.steps.values() if "response_length" in values]
    mean = sum(lengths) / len(lengths) if lengths else 0.0
    # Flushed tokens are stored: up to one window fewer than generated ones, and half a window may be on its way.
    least = _STORED + flush_tokens * 3 // 2
    return range(least, max(least + flush_tokens, round(_SHARE * mean)))


async def poll_until(ready: Callable[[], int]) -> int:
    """Polls `ready` until it returns more than 0: for files and state that send no events."""
    while True:
        if found := ready():
            return found
        await asyncio.sleep(_LOOK_S)
