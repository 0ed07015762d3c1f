"""Begins the training of a run, from its model or from its newest checkpoint."""

import asyncio
from pathlib import Path

from ebbtide.claimed_runs.run_loop import RunFollower
from ebbtide.client import Lease
from ebbtide.telemetry import get_logger
from ebbtide.trainer import training_checkpoint
from ebbtide.trainer.learning.local_learning import LocalLearning, choose_device
from ebbtide.trainer.ranks.rank_group import RankGroup, RankZeroLearning
from ebbtide.trainer.session_collector import SessionCollector
from ebbtide.trainer.settings import TrainerSettings
from ebbtide.trainer.training_checkpoint import CheckpointError, TrainingState
from ebbtide.trainer.trajectory_collector import TrajectoryCollector
from ebbtide.types.run import RunEvent

log = get_logger(__name__)


def checkpoints_of(lease: Lease) -> Path:
    """Returns the folder of the run's checkpoints."""
    return Path(lease.run.spec.output) / lease.run_id / "checkpoints"


class TrainingStart:
    """Loads what a training begins with. `following` must follow the run meanwhile."""

    def __init__(
        self, lease: Lease, settings: TrainerSettings, crew: RankGroup | None, following: RunFollower, lineage: str
    ) -> None:
        """`crew`: the ranks to train on; None: this process."""
        self._lease = lease
        self._settings = settings
        self._crew = crew
        self._following = following
        self._lineage = lineage
        self._spec = lease.run.spec
        self._folder = checkpoints_of(lease)

    async def begin(self) -> tuple[LocalLearning, TrajectoryCollector, list[RunEvent]]:
        """Loads the run's model or newest checkpoint. Returns the events to report, too."""
        learning, state = await self._load()
        await self._following.catch_up(self._lease)
        self._check_lineage(state)
        if state is None:
            return learning, self._collector(None), []
        log.info("resumed", step=state.step, version=state.version)
        message = f"training resumed from the checkpoint of step {state.step}"
        resumed = RunEvent(kind="resumed", key=self._lineage, message=message, values={"step": float(state.step)})
        # The checkpoint's writer may have died before it reported and committed the contents.
        return learning, self._collector(state), [*state.reports, resumed]

    def _collector(self, state: TrainingState | None) -> TrajectoryCollector:
        step, consumed, cursor = (state.step, state.consumed, state.cursor) if state else (0, (), "")
        if self._spec.from_agents:
            return SessionCollector(self._spec, self._following.steps, step=step, consumed=consumed, cursor=cursor)
        staleness = self._spec.batch.max_staleness
        return TrajectoryCollector(step=step, max_staleness=staleness, consumed=consumed, cursor=cursor)

    async def _load(self) -> tuple[LocalLearning, TrainingState | None]:
        """Loads the run's model, or its newest checkpoint with the training's state.

        Tries again if a superseded trainer wrote a newer checkpoint meanwhile, and removed this one.
        """
        while True:
            found = await asyncio.to_thread(training_checkpoint.prepare, self._folder)
            source = found or Path(self._spec.model)
            try:
                learning = await asyncio.to_thread(self._learn, source)
                if found is None:
                    return learning, None
                state = await asyncio.to_thread(learning.resume, found, run_id=self._lease.run_id)
            except Exception:
                if found is None or training_checkpoint.latest(self._folder) == found:
                    raise
            else:
                return learning, state

    def _learn(self, source: Path) -> LocalLearning:
        keep = self._settings.keep_published
        if self._crew is None:
            device = choose_device(self._settings.device)
            return LocalLearning(self._spec, source=source, device=device, keep_published=keep)
        return RankZeroLearning(self._crew, self._spec, run_id=self._lease.run_id, source=source, keep_published=keep)

    def _check_lineage(self, state: TrainingState | None) -> None:
        """Raises `CheckpointError` if the checkpoint is not this run's, or not its newest."""
        if state is not None and self._following.steps.get(state.version) != state.step:
            raise CheckpointError(
                f"{str(self._folder)!r} holds checkpoints of an earlier run called {state.run_id}; "
                "remove them, or submit with another output"
            )
        newest = max(self._following.checkpoints, default=0)
        if newest > (state.step if state else 0):
            raise CheckpointError(
                f"the checkpoint of step {newest} is not there any more ({self._following.checkpoints[newest]}), and "
                "its trajectories are deleted; restore the checkpoint, or submit the run again"
            )
