"""What is known of a run while it goes on: its record, what its events said so far, and the fleet.

Invariant: `follow` alone writes a `RunProgress`, from the run's first event on, in order, so two of one run agree in
all but samples, whenever they began. It is lost with the process and built again by the next `follow`.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ebbtide.types.fleet import Worker, WorkerState
from ebbtide.types.run import Run, RunEvent, RunSpec

if TYPE_CHECKING:
    from ebbtide.client import Client

_POLL_S: Final = 0.5
_RECENT: Final = 20
#: Events that tell a person something that the rest of the screen does not.
_NEWS: Final = frozenset({"status", "worker", "warning", "evaluation", "checkpoint", "resumed", "dead_letter"})


@dataclass(frozen=True)
class ResumedRun:
    """A rollout that went on elsewhere, behind its first `offset` tokens."""

    rollout: str
    source: str
    target: str
    offset: int


@dataclass(frozen=True)
class EvaluationResult:
    """`accuracy` is the share of answers right; `at_s` counts from the run's submission."""

    step: int
    accuracy: float
    problems: int
    at_s: float


@dataclass(frozen=True)
class WorkerInstall:
    """A worker's install of a version: seconds to fetch it beside generation, and in which generation stood still."""

    worker: str
    version: int
    pull_s: float
    pause_s: float


@dataclass(frozen=True)
class WorkerSample:
    """What a worker's heartbeat said since its start."""

    uptime_s: float
    busy_s: float
    tokens: int


@dataclass
class RunProgress:
    """`steps`: the values of each optimiser step's event; a step trained again by a resumed trainer counts once, as
    trained last. `news`: (seconds since the run's submission, text), newest last. `samples`: of each worker, the first
    and the newest taken while steps were trained; `recent`: those of the last ten seconds."""

    run_id: str
    run: Run | None = None
    workers: list[Worker] = field(default_factory=list)
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    step_at_s: dict[int, float] = field(default_factory=dict)
    evaluations: list[EvaluationResult] = field(default_factory=list)
    resumed: list[ResumedRun] = field(default_factory=list)
    installs: list[WorkerInstall] = field(default_factory=list)
    samples: dict[str, list[WorkerSample]] = field(default_factory=dict)
    recent: dict[str, deque[WorkerSample]] = field(default_factory=dict)
    checkpoint: str = ""
    news: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=100))
    told: int = 0
    """How many news there ever were."""

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
        """Take in a listing of the fleet. Evaluation and the wait for the first version are no measure of a worker."""
        self.workers = workers
        training = self.evaluations and not (self.spec and max(self.steps, default=0) >= self.spec.trainer.steps)
        for worker in workers:
            name, now = worker.worker_id, WorkerSample(worker.uptime_s, worker.busy_s, worker.tokens_generated)
            self.recent.setdefault(name, deque(maxlen=_RECENT)).append(now)
            if training:
                self.samples[name] = [*self.samples.get(name, [now])[:1], now]

    def rate(self, worker: Worker) -> float:
        """Tokens per second that a worker made of late, pauses included."""
        first, last = self.recent[worker.worker_id][0], self.recent[worker.worker_id][-1]
        return (
            (last.tokens - first.tokens) / (last.uptime_s - first.uptime_s) if last.uptime_s > first.uptime_s else 0.0
        )

    def apply(self, event: RunEvent) -> None:
        """Take in one event."""
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
    """Keep `progress` up to date until its run has ended; returns the ended run."""
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
        progress.run = await client.run(progress.run_id)
        progress.sample(await client.workers())
        await asyncio.sleep(_POLL_S)


def standing(worker: Worker) -> str:
    """Why a borrowed worker does nothing; "" if it may work, or is no such."""
    if worker.given_up and worker.state in {WorkerState.READY, WorkerState.INSTALLING}:
        return "is given up"
    if worker.borrowed is None or worker.state is not WorkerState.READY:
        return ""
    if worker.borrowed.asleep:
        return "sleeps: its weights are not on the device"
    return "" if worker.borrowed.granted else "stands still for its host"


def doing(worker: Worker) -> str:
    """What a worker is about, in a few words."""
    version = max((installed.version for installed in worker.installed), default=0)
    with_version = f" with version {version}" if version else ""
    match worker.state:
        case WorkerState.READY:
            works = f"generates {worker.running} rollouts" if worker.running else "waits for work"
            return standing(worker) or f"{works}{with_version}"
        case WorkerState.INSTALLING:
            return "installs new weights"
        case WorkerState.DRAINING:
            return f"hands over {worker.running} rollouts" if worker.running else "drains"
        case WorkerState.SHUNNED:
            return f"gets no work for {worker.shunned_s:.0f} s"
        case state:
            return state.name.lower()
