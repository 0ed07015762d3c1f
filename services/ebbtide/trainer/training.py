"""Trains one run with the built-in trainer: trajectories in, a policy version out, step by step, with checkpoints.

Invariant: the network's weights are those of `collector.step`. Their version is published in the background once they
are copied. It is announced, and in `following.versions`, before the next one is published, and before a checkpoint or
an event names it; also before its step is trained, unless the run's staleness allows training on older tokens
meanwhile. Only `Training` changes the weights. A restarted trainer resumes from the last checkpoint: it repeats
the steps since then, on the same trajectories in the same order, and publishes only versions not yet announced. With
`trainer.streaming` the order is that of arrival, so weights differ by rounding; gradients of an unfinished step die
with the process, and the step's groups stay open until its update.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from ebbtide.client import Client, Lease
from ebbtide.client.publisher.publisher import Publishing, PublishReport
from ebbtide.errors import AlreadyExists
from ebbtide.hub_models import model_folder
from ebbtide.run_client import CHECKPOINT, RunFollower
from ebbtide.runtime import Aside, race
from ebbtide.telemetry import counter, gauge, get_logger
from ebbtide.trainer import training_checkpoint
from ebbtide.trainer.collectors import SessionCollector, TrajectoryCollector
from ebbtide.trainer.learning.local_learning import LocalLearning, choose_device
from ebbtide.trainer.learning.parked_state import park_of
from ebbtide.trainer.lending.device_loan import DeviceLoan, MemoryLoan, OwnDevice, ReportedDevice, TrainingDevice
from ebbtide.trainer.lending.device_window import DeviceWindow, OwnWindow, TrainingWindow
from ebbtide.trainer.lending.shared_loan import LendingRanks, SharedLoan
from ebbtide.trainer.lending.turn_loan import TurnLoan, TurnWindow
from ebbtide.trainer.ranks.rank_group import RankGroup, RankZeroLearning
from ebbtide.trainer.settings import TrainerSettings
from ebbtide.trainer.trackers import progress_of, trackers_of
from ebbtide.trainer.tracking import RunTracking
from ebbtide.trainer.training_checkpoint import CheckpointError, Store, TrainingState
from ebbtide.types.ids import new_fence
from ebbtide.types.rollout import Trajectory
from ebbtide.types.run import RunEvent, to_mapping

P = ParamSpec("P")
T = TypeVar("T")

TRAIN: Final = "train"
_PHASES: Final = ("wait", TRAIN, "publish", "checkpoint")

_seconds = counter("trainer_seconds_total", "where the trainer's time went, by phase", ("phase",))


class StepClock:
    """Measures one step's seconds by phase, and of training those before the step's last group was there."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._trained: list[tuple[float, float]] = []  # from, to
        self._whole_at: float | None = None

    async def measure(self, phase: str, work: Awaitable[T]) -> T:
        began = time.monotonic()
        try:
            return await work
        finally:
            ended = time.monotonic()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + ended - began
            _seconds.labels(phase).inc(ended - began)
            if phase == TRAIN:
                self._trained.append((began, ended))

    def whole(self) -> None:
        """Notes that all groups of the step are there. Only the first call counts."""
        if self._whole_at is None:
            self._whole_at = time.monotonic()

    def overlapped_s(self) -> float:
        """Seconds of training before all groups of the step were there. 0 unless `whole` was called."""
        end = self._whole_at or 0.0
        return sum(max(0.0, min(to, end) - began) for began, to in self._trained)

    def learning_s(self) -> float:
        """Seconds of training so far."""
        return self._seconds.get(TRAIN, 0.0)

    def values(self) -> dict[str, float]:
        """Returns the seconds by phase, and those of training that overlapped if `whole` was called."""
        seconds = {f"seconds_{phase}": self._seconds.get(phase, 0.0) for phase in _PHASES}
        return seconds if self._whole_at is None else seconds | {"overlapped_s": self.overlapped_s()}


log = get_logger(__name__)

#: Wait for trajectories after which the trainer checks whether the run's quota holds them back.
_STARVED_S: Final = 20.0
#: Share of the quota in use from which an early checkpoint frees consumed trajectories.
_FULL: Final = 0.5
#: Time for a checkpoint that is being written when the training ends, so that a restart resumes from it. `ebbtide up`
#: kills its programs after 10 s.
_WRITE_S: Final = 5.0
#: Time for trackers to take a run's last events, and to finish.
_TRACK_S: Final = 5.0
#: More open groups than a run can have.
_ALL_GROUPS: Final = 1 << 30

_steps = counter("trainer_steps_total", "optimiser steps taken")
_tokens = counter("trainer_tokens_total", "sampled tokens trained on")
_overlapped = counter(
    "trainer_overlapped_seconds_total",
    "training before the last group of its step was complete; only with `trainer.streaming`",
)
_streamed = counter(
    "trainer_streamed_groups_total",
    "groups whose gradient was added as they became complete; only with `trainer.streaming`",
)
_reward = gauge("trainer_reward", "mean reward of the last step")


@cache
def _thread() -> Aside:
    return Aside("learning")


async def _compute(work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Computes in one thread for all runs of the process: before a run loads its model, the step of a cancelled one is
    over, and its memory is free."""
    return await _thread().do(partial(work, *args, **named))


def _nothing() -> None:
    """Done once all that was begun before is over."""


@dataclass
class _Trained:
    """The last step that was trained."""

    step: int  # optimiser steps in the present weights
    values: dict[str, float]  # to report
    clock: StepClock
    publishing: Publishing | None  # None: the weights were announced before
    told: asyncio.Task[None] | None = None  # reports the step once its weights are announced


async def train_run(
    client: Client,
    lease: Lease,
    settings: TrainerSettings,
    crew: RankGroup | None = None,
    lending: LendingRanks | None = None,
) -> None:
    """Trains the lease's run to its end. Raises `InvalidRequest` or `RunFailed` if the run is at fault."""
    following, lineage = RunFollower(client, lease.run_id), new_fence()
    loan = _loan(lease, settings, lending)
    reported = ReportedDevice(loan, lease.report, lineage=lineage) if loan else None
    device: TrainingDevice = reported or OwnDevice()
    turns = TurnLoan(device, _compute) if settings.turns else None  # whatever the run asks for: others share the device

    async def work() -> None:
        await (turns.take() if turns else device.take_back())  # the model's weights need its memory
        learning, collector, resumed = await TrainingStart(lease, settings, crew, following, lineage).begin()
        left = partial(lease.remaining_work, groups=_ALL_GROUPS)
        memory = MemoryLoan(device, learning, left) if reported and learning.on_gpu and not turns else None
        if turns:
            turns.learns(learning)
        used = turns or memory or device
        training = Training(client, lease, settings, following, lineage, learning, collector, used, tracking)
        try:
            await race(training.run(resumed), *([memory.run()] if memory else []))
        finally:  # several ranks do not wait: one may be gone, and its part of the checkpoint with it
            await training.close(_WRITE_S if crew is None else 0.0)

    async def trained() -> None:
        try:
            await race(following.run(), work())
        finally:
            if turns:
                await turns.close()

    if turns:  # a former training of this process that could not give its turn back may still compute in it
        await _compute(_nothing)
    async with _tracked(client, lease, settings, following) as tracking:
        await race(trained(), *([loan.run(), reported.run()] if loan and reported else []))


@asynccontextmanager
async def _tracked(
    client: Client, lease: Lease, settings: TrainerSettings, following: RunFollower
) -> AsyncIterator[RunTracking]:
    """Tracks the run beside the block. If the run has ended then, its last events are waited for."""
    folder, spec = folder_of(lease), lease.run.spec
    tracking = RunTracking(
        client,
        lease.run_id,
        environment=spec.environment.name,
        trackers=trackers_of(folder, lease.run_id, wandb_project=settings.wandb_project, spec=to_mapping(spec)),
        progress=await asyncio.to_thread(progress_of, folder),
        samples=settings.tracked_samples,
    )
    reading = asyncio.create_task(tracking.run())
    try:
        yield tracking
    finally:
        try:
            await asyncio.wait({reading}, timeout=_TRACK_S if following.ended else 0.0)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await tracking.close(_TRACK_S)


def _loan(lease: Lease, settings: TrainerSettings, lending: LendingRanks | None) -> DeviceLoan | SharedLoan | None:
    """The devices of all ranks, if the trainer lends or shares them. `lending`: what the ranks know of one another."""
    turns = settings.turns
    if not (settings.generate or turns):
        return None
    folder, priority = Path(settings.grant_dir), lease.run.spec.share.priority
    if lending is not None and lending.others:
        return SharedLoan(folder, lending, run_id=lease.run_id, lease=lease.number, turns=turns, priority=priority)
    if not turns:
        return DeviceLoan(folder, run_id=lease.run_id, lease=lease.number)
    pids = lending.pids if lending is not None else (os.getpid(),)
    return DeviceLoan(folder, run_id=lease.run_id, lease=lease.number, pids=pids, priority=priority)


class Training:
    """Trains one run under one lease, from its start on."""

    def __init__(
        self,
        client: Client,
        lease: Lease,
        settings: TrainerSettings,
        following: RunFollower,
        lineage: str,
        learning: LocalLearning,
        collector: TrajectoryCollector,
        device: TrainingDevice | TurnLoan,
        tracking: RunTracking,
    ) -> None:
        self._client = client
        self._lease = lease
        self._settings = settings
        self._following = following
        self._lineage = lineage
        self._learning = learning
        self._collector = collector
        self._tracking = tracking
        self._window: TrainingWindow = OwnWindow(self._groups)
        if isinstance(device, TurnLoan):
            self._window = TurnWindow(device, self._groups)
        elif settings.generate:
            self._window = DeviceWindow(lease, following, collector, device, self._relieve, fixed_s=settings.window_s)
        self._spec = lease.run.spec
        self._trained: _Trained | None = None
        self._writer = Aside("checkpoint")
        self._tasks = asyncio.TaskGroup()  # beside the steps: of one `run`
        self._storing: asyncio.Task[None] | None = None  # makes a checkpoint durable

    async def run(self, resumed: list[RunEvent]) -> None:
        """Reports `resumed`, then trains until cancelled: the driver ends the run."""
        await self._commit(resumed)
        async with self._tasks:
            self._tasks.create_task(self._read())
            while (publishing := await self._publish()) is not None:
                try:
                    self._following.announced(await publishing)
                except AlreadyExists as error:  # the relay has the version of a run that the store lost
                    log.warning("taking the next number", reason=str(error))
            await self._window.open()
            await self._window.rest()
            while self._collector.step < self._spec.trainer.steps:
                await self._step()
            await self._stored()
            # The driver evaluates the last version and ends the run. Late trajectories are dropped and committed.
            while True:
                await self._following.until(lambda: bool(self._collector.uncommitted))
                await self._commit([])

    async def _read(self) -> None:
        async for trajectory in self._lease.trajectories(self._collector.cursor()):
            self._collector.add(trajectory)
            await self._following.notify()

    async def _step(self) -> None:
        step, clock = self._collector.step, StepClock()
        training = self._train_streamed if self._spec.trainer.streaming else self._train_whole
        values = await training(step, clock)
        await clock.measure("publish", self._settle())
        trained = _Trained(step + 1, values, clock, await clock.measure("publish", self._publish()))
        await clock.measure("publish", self._window.open())
        if step + 1 == self._spec.trainer.steps or (step + 1) % self._spec.trainer.checkpoint_every == 0:
            await clock.measure("publish", self._announced(trained))
            await self._checkpoint(trained)
        else:
            trained.told = self._tasks.create_task(self._tell(trained))
            self._trained = trained
        await self._window.rest()
        _steps.inc()
        _overlapped.inc(clock.overlapped_s())
        _tokens.inc(values["tokens"])
        _reward.set(values.get("reward", 0.0))
        log.info("step", step=step + 1, reward=values.get("reward"), **clock.values())

    async def _train_whole(self, step: int, clock: StepClock) -> dict[str, float]:
        """Trains the step once all its groups are there. Returns the values to report."""
        await clock.measure("wait", self._window.close(lambda: self._whole(step)))
        await clock.measure("wait", self._window.groups(lambda: self._whole(step), lambda: self._whole(step)))
        await self._settle_before(clock)
        trajectories = self._collector.take(self._following.steps)
        steps, version = dict(self._following.steps), self._version(step)
        training = _compute(self._learning.step, trajectories, step=step, steps=steps, version=version)
        values = await clock.measure(TRAIN, training)
        return values | self._learnt(step, trajectories, clock)

    async def _train_streamed(self, step: int, clock: StepClock) -> dict[str, float]:
        """Trains the step on its groups as they become whole. Returns the values to report.

        An idle trainer begins with what is there: the last group waits for the part under way at most. One whose device
        generates begins when its window is over.
        """
        whole = asyncio.create_task(self._note_whole(step, clock))
        collector, following, learning = self._collector, self._following, self._learning
        try:
            await clock.measure("wait", self._window.close(lambda: self._whole(step)))
            while not self._whole(step) or collector.new_groups():
                await clock.measure("wait", self._window.groups(lambda: self._some(step), lambda: self._whole(step)))
                await self._settle_before(clock)
                count, version = collector.new_groups(), self._version(step)
                groups = collector.hand_out(following.steps)
                await clock.measure(TRAIN, _compute(learning.add_groups, groups, step=step, version=version))
                _streamed.inc(count)
            clock.whole()
        finally:
            whole.cancel()
        trajectories, steps = collector.take(following.steps), dict(following.steps)
        finishing = _compute(learning.finish_step, trajectories, step=step, steps=steps)
        values = await clock.measure(TRAIN, finishing)
        return values | self._learnt(step, trajectories, clock)

    def _learnt(self, step: int, trajectories: Sequence[Trajectory], clock: StepClock) -> dict[str, float]:
        """Shows window and tracking what `step` was trained on. Returns the window's values to report."""
        self._tracking.keep_samples(step + 1, trajectories, self._learning.text)
        return self._window.trained(trajectories, learning_s=clock.learning_s())

    def _some(self, step: int) -> bool:
        """Whether there are groups without gradients, or all groups."""
        return self._whole(step) or self._collector.new_groups() > 0

    async def _note_whole(self, step: int, clock: StepClock) -> None:
        await self._following.until(lambda: self._whole(step))
        clock.whole()

    async def _settle_before(self, clock: StepClock) -> None:
        """Waits for the version in publication, unless the groups that are there may be trained without it."""
        if self._trained is None or self._trained.told is None:
            return
        strict = not self._spec.batch.max_staleness
        if strict or self._trained.told.done() or self._collector.news(self._following.steps):
            await clock.measure("publish", self._settle())

    def _version(self, step: int) -> int:
        """Returns the version of the weights that `step` is trained with; it may not be announced yet."""
        if self._trained is not None and self._trained.publishing is not None:
            return self._trained.publishing.number
        return self._following.versions[step]

    async def _tell(self, trained: _Trained) -> None:
        """Reports a step once its weights' version is announced."""
        await self._announced(trained)
        await self._lease.report([self._event(trained)])

    async def _settle(self) -> None:
        """Waits until the version in publication is announced, and its step reported."""
        if self._trained is not None and self._trained.told is not None:
            await self._trained.told
        self._trained = None

    async def _groups(self, enough: Callable[[], bool]) -> None:
        """Waits until there are enough groups of the step."""
        while True:
            try:
                async with asyncio.timeout(_STARVED_S):
                    await self._following.until(enough)
            except TimeoutError:
                await self._relieve()
            else:
                return

    def _whole(self, step: int) -> bool:
        """Whether all groups of the step that are not dropped are there. Until then engines on the trainer's own device
        make groups whole sooner, and there may be no others; from then on nothing is left for them to do."""
        expected = self._spec.batch.groups_per_step - self._following.dropped[step]
        return self._collector.whole_groups() >= expected

    async def _relieve(self) -> None:
        """Takes a checkpoint if the quota has no room for the missing trajectories: it frees consumed ones."""
        await self._stored()
        if self._collector.uncommitted:
            run = await self._client.run(self._lease.run_id)
            if run.counters.get("bytes", 0) > _FULL * self._spec.quota_bytes:
                log.warning("checkpointing early: the run's quota_bytes is small for checkpoint_every")
                await self._settle()
                held = await self._window.hold()
                await self._checkpoint(None)
                if held:
                    await self._window.rest()
                await self._stored()

    async def _publish(self) -> Publishing | None:
        """Starts to publish the weights unless their step's were announced before. They may change afterwards."""
        step = self._collector.step
        if step in self._following.versions:
            return None
        parent = self._following.versions.get(step - 1, 0)
        if (exchange := await _compute(self._learning.exchange)) is not None:
            self._lease.publisher(exchange)
        return await self._lease.publishing(self._learning.tensors(), step=step, parent=parent)

    async def _announced(self, trained: _Trained) -> None:
        if trained.publishing is not None:
            self._following.announced(await trained.publishing)
            trained.values |= publish_values(trained.publishing.report)

    async def _checkpoint(self, trained: _Trained | None) -> None:
        """Copies the training, reports the step, and begins to make the copy durable beside the next steps.

        A checkpoint waits for the one before: there is one copy at most, and outcomes are committed in their order.
        """
        collector, step = self._collector, self._collector.step
        clock = StepClock() if trained is None else trained.clock
        await clock.measure("checkpoint", self._stored())
        events = [] if trained is None else [self._event(trained)]
        state = TrainingState(
            run_id=self._lease.run_id,
            lineage=self._lineage,
            step=step,
            version=self._following.versions[step],
            cursor=collector.cursor(),
            consumed=tuple(collector.uncommitted),
            reports=tuple(events),
        )
        keep = self._settings.keep_checkpoints
        copying = _compute(self._learning.begin_checkpoint, checkpoints_of(self._lease), state, keep=keep)
        store = await clock.measure("checkpoint", copying)
        self._storing = self._tasks.create_task(self._store(store, step, len(state.consumed)))
        if trained is not None:
            await self._lease.report([self._event(trained)])

    async def _store(self, store: Store, step: int, count: int) -> None:
        """Makes a checkpoint durable, then lets the coordinator count and delete the trajectories that it holds."""
        path = await self._writer.do(store)
        saved = RunEvent(
            kind=CHECKPOINT,
            key=f"{self._lineage}.{step}",
            message=f"checkpoint of step {step}",
            values={"step": float(step)},
            labels={"path": str(path.resolve())},
        )
        await self._commit([saved], count=count)

    async def _stored(self) -> None:
        """Waits until the checkpoint that is being written is durable, and its trajectories committed."""
        if self._storing is not None:
            await self._storing
            self._storing = None

    async def _commit(self, events: list[RunEvent], *, count: int | None = None) -> None:
        """Reports, then commits the first `count` outcomes (default: all): after the last commit the run may end."""
        outcomes = self._collector.outcomes()[:count]
        await self._lease.report(events)
        await self._lease.commit(outcomes)
        self._collector.committed(len(outcomes))

    async def close(self, timeout_s: float) -> None:
        """Waits at most `timeout_s` for a checkpoint that is being written. The training must be over."""
        await self._writer.close(timeout_s)

    def _event(self, trained: _Trained) -> RunEvent:
        """Makes the step's event; `step` counts the optimiser steps in the new weights, as their version does."""
        step, values = trained.step, trained.values
        head = {"step": float(step), "version": float(self._following.versions[step])}
        return RunEvent(
            kind="step",
            key=f"{self._lineage}.{step}",
            message=f"step {step}: reward {values['reward']:.3f}" if "reward" in values else f"step {step}: no reward",
            values={**head, **values, **trained.clock.values()},
            labels={"lineage": self._lineage},
        )


def publish_values(report: PublishReport) -> dict[str, float]:
    """Returns the values of a step's event on publishing: bytes, the share of changed elements, seconds."""
    return {
        "publish_bytes": float(report.bytes_sent),
        "publish_dense_bytes": float(report.dense_bytes),
        "publish_density": report.density,
        "publish_pause_s": report.pause_s,
        "publish_seconds": report.pause_s + report.encode_s + report.upload_s,
        "publish_patch": float(report.kind == "patch"),
    }


def folder_of(lease: Lease) -> Path:
    """Returns the folder of what the trainer writes of the run."""
    return Path(lease.run.spec.output) / lease.run_id


def checkpoints_of(lease: Lease) -> Path:
    """Returns the folder of the run's checkpoints."""
    return folder_of(lease) / "checkpoints"


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
            try:
                return await self._read(found)
            except Exception:
                if found is None or training_checkpoint.latest(self._folder) == found:
                    raise

    async def _read(self, found: Path | None) -> tuple[LocalLearning, TrainingState | None]:
        source = found if found is not None else await asyncio.to_thread(model_folder, self._spec.model)
        learning = await _compute(self._learn, source)
        if found is None:
            return learning, None
        return learning, await _compute(learning.resume, found, run_id=self._lease.run_id)

    def _learn(self, source: Path) -> LocalLearning:
        kept: dict[str, Any] = {"keep_published": self._settings.keep_published, "offload": self._settings.offload}
        kept["park"] = park_of(self._settings) if self._settings.turns else None
        if self._crew is None:
            device = choose_device(self._settings.device)
            return LocalLearning(self._spec, source=source, device=device, **kept)
        return RankZeroLearning(self._crew, self._spec, run_id=self._lease.run_id, source=source, **kept)

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
