"""Follows a run: its record, what its events said so far, and the fleet.

Invariant: only `follow` writes a `RunProgress`, from the run's first event on, in order; so two of one run agree in all
but samples. It is lost with the process, and the next `follow` builds it again.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ebbtide.cli.cluster_connection import coordinator_of
from ebbtide.cli.waiting import Waiting
from ebbtide.types.fleet import Worker, WorkerState
from ebbtide.types.run import Run, RunEvent, RunSpec

if TYPE_CHECKING:
    from ebbtide.client import Client

_POLL_S: Final = 0.5
_RECENT: Final = 20
#: Events whose message the screen shows; the others appear elsewhere on it.
_NEWS: Final = frozenset(
    {"status", "worker", "warning", "evaluation", "checkpoint", "resumed", "dead_letter", "round_opened"}
)


@dataclass(frozen=True)
class ResumedRun:
    """A rollout that went on at another worker, after its first `offset` tokens."""

    rollout: str
    source: str
    target: str
    offset: int


@dataclass(frozen=True)
class EvaluationResult:
    step: int
    accuracy: float  # share of right answers
    problems: int
    at_s: float  # since the run's submission


@dataclass(frozen=True)
class WorkerInstall:
    """A worker's install of a version."""

    worker: str
    version: int
    pull_s: float  # fetched beside generation
    pause_s: float  # generation stood still


@dataclass(frozen=True)
class WorkerSample:
    """Sums since a worker's start, from a heartbeat."""

    uptime_s: float
    busy_s: float
    tokens: int


@dataclass
class RunProgress:
    run_id: str
    run: Run | None = None
    workers: list[Worker] = field(default_factory=list)
    #: step -> its event's values; a step that a resumed trainer trained again has the last ones
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    step_at_s: dict[int, float] = field(default_factory=dict)
    evaluations: list[EvaluationResult] = field(default_factory=list)
    resumed: list[ResumedRun] = field(default_factory=list)
    installs: list[WorkerInstall] = field(default_factory=list)
    #: worker -> the first and the newest sample taken while steps were trained
    samples: dict[str, list[WorkerSample]] = field(default_factory=dict)
    recent: dict[str, deque[WorkerSample]] = field(default_factory=dict)  # of the last ten seconds
    checkpoint: str = ""
    #: (seconds since the run's submission, text), newest last
    news: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=100))
    told: int = 0  # all news so far, with those that `news` has lost

    @property
    def spec(self) -> RunSpec | None:
        return self.run.spec if self.run else None

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each step so far, in order."""
        return [values["reward"] for _, values in sorted(self.steps.items()) if "reward" in values]

    def tell(self, text: str, at_s: float) -> None:
        self.news.append((at_s, text))
        self.told += 1

    def sample(self, workers: list[Worker]) -> None:
        """Takes in a listing of the fleet. `samples` leaves out evaluation and the wait for the first version."""
        self.workers = workers
        training = self.evaluations and not (self.spec and max(self.steps, default=0) >= self.spec.trainer.steps)
        for worker in workers:
            name, now = worker.worker_id, WorkerSample(worker.uptime_s, worker.busy_s, worker.tokens_generated)
            self.recent.setdefault(name, deque(maxlen=_RECENT)).append(now)
            if training:
                self.samples[name] = [*self.samples.get(name, [now])[:1], now]

    def rate(self, worker: Worker) -> float:
        """Tokens per second that a worker made lately, pauses included."""
        first, last = self.recent[worker.worker_id][0], self.recent[worker.worker_id][-1]
        seconds = last.uptime_s - first.uptime_s
        return (last.tokens - first.tokens) / seconds if seconds > 0 else 0.0

    def apply(self, event: RunEvent) -> None:
        """Takes in one event."""
        step = int(event.values.get("step", 0))
        if event.kind == "step":
            self.steps[step] = dict(event.values)
            self.step_at_s[step] = event.age_s
        elif event.kind == "evaluation" and "accuracy" in event.values:
            found = EvaluationResult(step, event.values["accuracy"], int(event.values["problems"]), event.age_s)
            self.evaluations.append(found)
        elif event.kind == "checkpoint":
            self.checkpoint = event.labels.get("path", "")
        elif event.kind == "installed":
            values, version = event.values, int(event.values["version"])
            self.installs.append(WorkerInstall(event.labels["worker"], version, values["pull_s"], values["pause_s"]))
        elif event.kind == "resumed" and "rollout" in event.labels:
            labels, offset = event.labels, int(event.values["offset"])
            self.resumed.append(ResumedRun(labels["rollout"], labels["from"], labels["to"], offset))
            return
        if event.kind in _NEWS:
            self.tell(event.message or f"{event.kind} {event.key}", event.age_s)


async def follow(client: "Client", progress: RunProgress) -> Run:
    """Keeps `progress` up to date until its run has ended. Returns the ended run."""
    polling = asyncio.create_task(_poll(client, progress))
    try:
        async for event in client.watch(progress.run_id):
            progress.apply(event)
        progress.run = await client.run(progress.run_id)
        return progress.run
    finally:
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)


async def _poll(client: "Client", progress: RunProgress) -> None:
    while True:
        with Waiting(coordinator_of(client)):
            progress.run = await client.run(progress.run_id)
            progress.sample(await client.workers())
        await asyncio.sleep(_POLL_S)


def standing(worker: Worker) -> str:
    """Why a borrowed worker does nothing; "" if it may work, or is not borrowed."""
    if worker.given_up and worker.state in {WorkerState.READY, WorkerState.INSTALLING}:
        return "is given up"
    if worker.borrowed is None or worker.state is not WorkerState.READY:
        return ""
    if worker.borrowed.asleep:
        return "sleeps: its weights are not on the device"
    return "" if worker.borrowed.granted else "stands still for its host"


def _drafting(worker: Worker) -> str:
    """What its drafts bring; empty where it makes none."""
    drafting = worker.drafting
    if drafting is None or not drafting.drafts:
        return ""
    return f"; a draft brings {drafting.accepted / drafting.drafts:.1f} tokens"


def doing(worker: Worker) -> str:
    """Says what a worker is doing, in a few words."""
    version = max((installed.version for installed in worker.installed), default=0)
    with_version = f" with version {version}" if version else ""
    match worker.state:
        case WorkerState.READY:
            works = f"generates {worker.running} rollouts" if worker.running else "waits for work"
            return standing(worker) or f"{works}{with_version}{_drafting(worker)}"
        case WorkerState.INSTALLING:
            return "installs new weights"
        case WorkerState.DRAINING:
            return f"hands over {worker.running} rollouts" if worker.running else "drains"
        case WorkerState.SHUNNED:
            return f"gets no work for {worker.shunned_s:.0f} s"
        case state:
            return state.name.lower()
