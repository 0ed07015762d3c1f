"""Measures how much of a processor a round's parts take with forecasts, for a thousand workers and a full queue.

The coordinator's own rounds, runs and workers play in virtual time, without a store. Figures are CPU time.
"""

from collections.abc import Callable, Iterator
from random import Random
from statistics import quantiles
from time import thread_time
from typing import Any, Final

from ebbtide.coordinator.dispatch.dispatch_round import Action, SlotFill
from ebbtide.coordinator.fleet.worker_registry import WorkerRegistry
from ebbtide.coordinator.recording import DecidingParts
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.coordinator.run_events import SilentRunEvents
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.coordinator.state.attempt_records import started
from ebbtide.coordinator.state.worker_reports import AttachReport, InstalledReport
from ebbtide.step_pacing import VersionBounds
from ebbtide.types.fleet import PROTOCOL_VERSION, EngineInfo, WorkerKind
from ebbtide.types.run import BatchSpec, EnvironmentSpec, RunSpec, Sampling, TailSpec
from ebbtide.types.weights import PolicyVersion

_WORKERS, _SLOTS, _QUEUED, _GROUP = 1_000, 16, 100_000, 8
_CAP: Final = 16_384
_ROUND_S, _SECONDS = 0.05, 15.0
_TOKENS_PER_S: Final = 40.0
_VERSION: Final = PolicyVersion(policy="policy", version=1, root=b"r" * 32)


class FullFleet:
    """A fleet that generates in virtual time, and a queue that lasts."""

    def __init__(self, order: str, workers: int = _WORKERS, queued: int = _QUEUED) -> None:
        self.now, self._draw, self._count = 0.0, Random(0), 0
        settings, events = CoordinatorSettings(), SilentRunEvents()
        self._parts = DecidingParts(settings, clock=lambda: self.now)
        names = (f"s{number:05}" for number in range(workers))
        registry = WorkerRegistry(settings, self._parts.state, self._parts.trust, events, new_id=lambda: next(names))
        self._rounds = self._parts.new_rounds(lambda _: b"k" * 32, events)
        spec = RunSpec(
            name="r",
            model="m",
            environment=EnvironmentSpec(name="e"),
            batch=BatchSpec(groups_per_step=256),
            sampling=Sampling(max_tokens=_CAP),
            tail=TailSpec(order="lengths" if order == "lengths" else "submitted"),
        )
        self.run = self._parts.state.add_run("r", spec)
        with self.run.mirror.rereading():
            self.run.mirror.note_reconciled()
        self.run.versions.announce(_VERSION)
        engine = EngineInfo(model="m", vocab_size=1_000, max_model_len=2 * _CAP)
        for number in range(workers):
            hello = AttachReport(
                worker_id=f"w{number}",
                kind=WorkerKind.SPOT,
                protocol_version=PROTOCOL_VERSION,
                slots=_SLOTS,
                engine=engine,
            )
            registry.attach(hello)
        for _ in self._rounds.steps(self.now):
            pass
        for session in list(self._parts.state.sessions.values()):
            registry.hear(session, InstalledReport(version=_VERSION, run_id="r"))
        self._truth: dict[str, int] = {}
        self._submit(queued)

    def _submit(self, count: int) -> None:
        for place in range(count):
            if place % _GROUP == 0:
                shared = self._draw.lognormvariate(7.6, 0.7)
            name = f"x{place}"
            self._truth[name] = min(_CAP, max(1, round(shared * self._draw.lognormvariate(0.0, 0.5))))
            self.run.admit(
                QueuedRollout(
                    rollout_id=name,
                    episode_id=name,
                    bounds=VersionBounds(0, 0),
                    length=256,
                    place=place,
                    group=place - place % _GROUP,
                    budget=_CAP,
                )
            )

    def times_ms(self, seconds: float) -> list[float]:
        """The processor's time for each part of each round, in milliseconds."""
        found = list[float]()
        for _ in range(round(seconds / _ROUND_S)):
            self.now += _ROUND_S
            self._generate()
            steps: Iterator[Action] = self._rounds.steps(self.now)
            while True:
                begin_s = thread_time()
                action = next(steps, self)
                found.append(1e3 * (thread_time() - begin_s))
                if action is self:
                    break
                if isinstance(action, SlotFill):
                    found += self._fill(action)
        return found

    def _fill(self, action: SlotFill) -> list[float]:
        found = list[float]()
        while action.due(self.now):
            begin_s = thread_time()
            placements = action.place(self.now)
            found.append(1e3 * (thread_time() - begin_s))
            if not placements:
                break
            for rollout_id, session_id in placements:
                queued = self.run.take_queued(rollout_id)
                if queued is not None:
                    self._count += 1
                    attempt = started(
                        self.run, queued, f"a{self._count}", stored=0, number=1, max_tokens=_CAP, now=self.now
                    )
                    self.run.start(attempt, self._parts.state.sessions[session_id])
                    attempt.begin(self.now)
            action.note_turn(0.0, self.now)
        return found

    def _generate(self) -> None:
        made = round(_TOKENS_PER_S * _ROUND_S)
        for attempt in list(self.run.running.values()):
            length = self._truth[attempt.rollout.rollout_id]
            end = min(length, attempt.stored + made)
            self.run.accept_tokens([attempt], [end])
            if end >= length:
                self.run.finish(attempt.rollout.rollout_id, attempt.attempt_id)


def decision_part(tell: Callable[[str], None], *, quick: bool = False) -> dict[str, Any]:
    """The times of both orders. `quick`: a third of the virtual time."""
    rows = [_played(order, _SECONDS / 3 if quick else _SECONDS) for order in ("submitted", "lengths")]
    for row in rows:
        tell(f"decisions in the order {row['order']}: p99 {row['p99_ms']} ms of the processor")
    return {"decisions": rows, "figures": {}}


def _played(order: str, seconds: float) -> dict[str, Any]:
    parts = quantiles(FullFleet(order).times_ms(seconds), n=100)
    times = {"p50_ms": round(parts[49], 2), "p99_ms": round(parts[98], 2)}
    return {"order": order, **times, "workers": _WORKERS, "queued": _QUEUED, "seconds": seconds}
