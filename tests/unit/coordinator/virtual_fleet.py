"""A coordinator's model in virtual time, without a store, an event loop or a clock, as a simulator runs it."""

import itertools
from collections import Counter
from typing import Any, Final

from msgspec.structs import replace

from ebbtide.coordinator.dispatch.dispatch_round import DispatchRound, SlotFill
from ebbtide.coordinator.dispatch.unserved_work import DeadLetters
from ebbtide.coordinator.fleet.worker_registry import WorkerRegistry
from ebbtide.coordinator.recording import DecidingParts
from ebbtide.coordinator.run_events import SilentRunEvents
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.coordinator.state.attempt_records import due_orphans, new_entry, queued_again, started
from ebbtide.coordinator.state.worker_messages import Install
from ebbtide.coordinator.state.worker_reports import AttachReport, HeartbeatReport, InstalledReport, ReleasedReport
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.types.fleet import PROTOCOL_VERSION, EndCause, WorkerKind
from ebbtide.types.rollout import RolloutKind, RolloutRequest
from ebbtide.types.run import EnvironmentSpec, RunSpec, Sampling, TailSpec
from ebbtide.types.weights import PolicyVersion
from tests.unit.coordinator.model_fleet import ENGINE

VERSION: Final = PolicyVersion(policy="policy", version=1, root=b"r" * 32)


class VirtualFleet:
    def __init__(self, *, slots: int = 4, tail: TailSpec | None = None, context: int = 0, **settings: Any) -> None:
        """`context`: `max_model_len` of the run."""
        self.now, self._slots, ids = 0.0, slots, itertools.count()
        chosen, events = CoordinatorSettings(**settings), SilentRunEvents()
        self.parts = DecidingParts(chosen, clock=lambda: self.now)
        self.state = self.parts.state
        self.registry = WorkerRegistry(chosen, self.state, self.parts.trust, events, new_id=lambda: f"s{next(ids)}")
        self.rounds: DispatchRound = self.parts.new_rounds(lambda _: b"k" * 32, events)
        spec = RunSpec(
            name="r",
            model="m",
            environment=EnvironmentSpec(name="e"),
            tail=tail or TailSpec(),
            max_model_len=context,
        )
        self.run = self.state.add_run("r", spec)
        with self.run.mirror.rereading():
            self.run.mirror.note_reconciled()
        self.run.versions.announce(VERSION)
        self.placed: list[tuple[float, str, str]] = []
        self.letters: list[str] = []
        self.unfilled: set[str] = set()  # runs whose rollouts do not start

    def attach(self, name: str, *, context: int = ENGINE.max_model_len) -> WorkerSession:
        """A worker that installs at once what it is told."""
        hello = AttachReport(
            worker_id=name,
            kind=WorkerKind.SPOT,
            protocol_version=PROTOCOL_VERSION,
            slots=self._slots,
            engine=replace(ENGINE, max_model_len=context),
        )
        session, _, _ = self.registry.attach(hello)
        self.round()
        told = session.outbox.take()[0]
        assert isinstance(told, Install)
        assert told.run_id == "r"
        self.registry.hear(session, InstalledReport(version=VERSION, run_id="r"))
        return session

    def submit(
        self, count: int, *, first: int = 0, max_version: int = 0, group: int = 0, run_id: str = "r", length: int = 8
    ) -> None:
        """`group`: the place of their group; `length`: tokens of each prompt."""
        for number in range(first, first + count):
            request = RolloutRequest(
                rollout_id=f"x{number}",
                group_id="g",
                episode_id=f"e{number}",
                prompt_ids=b"",
                sampling=Sampling(max_tokens=64),
                kind=RolloutKind.TRAIN,
                max_version=max_version,
            )
            entry = new_entry(request, place=number, group=group, length=length, now=self.now)
            self.state.runs[run_id].admit(entry)

    def round(self, passing_s: float = 0.1) -> None:
        self.now += passing_s
        for run in self.state.runs.values():
            for orphaned, attempts in due_orphans(run, self.now)[0].items():
                avoid = frozenset({"gone"} if orphaned.why.avoid else ())
                for one in attempts:
                    again = queued_again(one, stored=one.stored, avoid=avoid, no_progress=0, now=self.now)
                    run.put_back(one, again)
        for action in self.rounds.steps(self.now):
            if isinstance(action, SlotFill):
                if action.run.run_id not in self.unfilled:
                    self._fill(action)
            elif isinstance(action, DeadLetters):
                self.letters += [rollout_id for rollout_id, _ in action.letters]

    def _fill(self, action: SlotFill) -> None:
        while action.due(self.now) and (placements := action.place(self.now)):
            for rollout_id, session_id in placements:
                queued = action.run.take_queued(rollout_id)
                assert queued is not None
                number, session = len(self.placed), self.state.sessions[session_id]
                self.placed.append((self.now, rollout_id, session.worker_id))
                made = queued.made
                attempt = started(action.run, queued, f"a{number}", stored=made, number=1, max_tokens=64, now=self.now)
                action.run.start(attempt, session)
            action.note_turn(0.0, self.now)

    def beat(self, *sessions: WorkerSession) -> None:
        for session in sessions:
            self.registry.hear(session, HeartbeatReport(uptime_s=self.now))


def lived(**settings: Any) -> VirtualFleet:
    """Two workers, of which one falls silent with its rollouts in the midst."""
    fleet = VirtualFleet(**settings)
    gone, stays = fleet.attach("gone"), fleet.attach("stays")
    fleet.submit(12)
    fleet.round()
    for attempt in list(fleet.run.running.values()):
        attempt.begin(fleet.now)
        fleet.run.accept_tokens([attempt], [5])
    while not gone.gone:
        fleet.round(0.25)
        fleet.beat(stays)
        for session in (gone, stays):
            session.append_stream.tokens_came(fleet.now)
        for _ in fleet.registry.judge(fleet.now):
            pass
    for attempt in list(stays.attempts.values()):
        fleet.run.finish(attempt.rollout.rollout_id, attempt.attempt_id)
    fleet.round()
    return fleet


def balanced(**settings: Any) -> VirtualFleet:
    """A slow worker has four rollouts when a fast one joins and gets a fifth: some move, handed back for it."""
    fleet = VirtualFleet(**settings)
    slow = fleet.attach("slow")
    fleet.submit(4)
    fleet.round()
    fast = fleet.attach("fast")
    workers = {slow: 1, fast: 100}  # tokens of each of its rollouts in a round
    fleet.submit(1, first=4)
    made: Counter[str] = Counter()
    for beat in range(200):
        fleet.round(0.25)
        for session, tokens in workers.items():
            for attempt in list(session.pending.values()):
                attempt.begin(fleet.now)
            made[session.worker_id] += len(session.attempts) * tokens
            report = HeartbeatReport(uptime_s=fleet.now, busy_s=fleet.now, tokens_generated=made[session.worker_id])
            if beat % 4 == 0:
                fleet.registry.hear(session, report)
        asked = tuple(attempt.ref for attempt in slow.attempts.values() if attempt.target)
        if asked:
            fleet.registry.hear(slow, ReleasedReport(attempts=asked, cause=EndCause.MOVED))
    return fleet


def ordered(**settings: Any) -> VirtualFleet:
    """Three steps of a run that starts by lengths: of its groups every other one has long responses."""
    fleet = VirtualFleet(tail=TailSpec(order="lengths"), **settings)
    fleet.attach("w1")
    for step in range(3):
        first = 100 * step
        for group in range(first, first + 64, 8):
            fleet.submit(8, first=group, group=group)
        while fleet.run.queue or fleet.run.running:
            fleet.round(0.2)
            for attempt in list(fleet.run.running.values()):
                attempt.begin(fleet.now)
                fleet.run.accept_tokens([attempt], [attempt.stored + 2])
                if attempt.stored >= (40 if attempt.rollout.group % 16 else 6):
                    fleet.run.finish(attempt.rollout.rollout_id, attempt.attempt_id)
    return fleet
