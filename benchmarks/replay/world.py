"""Replays a spot trace in simulated time on the coordinator's own rules: place, rebalance and what they learn.

Invariant: each rollout of the step is in exactly one place: in line, at one worker, on its way (`_travelling`), or
ended. Events are taken in order of time; all of one instant are taken before anything is decided.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random
from typing import Final

from msgspec.structs import replace

from benchmarks.replay.engine import Engine, Rollout
from benchmarks.replay.result import Result
from benchmarks.replay.setting import Policy, Setting, costless
from benchmarks.replay.traces import FleetEvent
from ebbtide.scheduling.dispatch import rollout_moves
from ebbtide.scheduling.dispatch.host_view import HostView
from ebbtide.scheduling.dispatch.placement import pending_limit, place
from ebbtide.scheduling.dispatch.response_lengths import ResponseLengths
from ebbtide.scheduling.dispatch.rollout_queue import QueuedRollout, RolloutQueue
from ebbtide.scheduling.dispatch.throughput import WorkerThroughput
from ebbtide.scheduling.steps.step_pacing import VersionBounds

_BOUNDS: Final = VersionBounds(1, 1)
_CONTEXT: Final = 1 << 20
#: Spans shorter than this teach nothing, in the live coordinator either.
_SPAN_S: Final = 0.25
#: After a rollout ended, and without any event, balance is looked at so late; after all else after `Setting.tick_s`.
#: The live coordinator looks several times a second: this is to our disadvantage.
_ENDED_TICK_S: Final = 5.0
_IDLE_TICK_S: Final = 10.0


def _slots(host: HostView) -> int:
    return host.slots


class Unlearnt(WorkerThroughput):
    """Knows of no plateau: as if every engine made as much with one rollout as with many."""

    def rate(self, running: float, context: float) -> float:  # noqa: ARG002
        return 1_000.0 / max(1.0, running)

    def plateau(self, context: float) -> int:  # noqa: ARG002
        return 0


class Foretold(ResponseLengths):
    """Of one who knows: a rollout's budget is what it has left."""

    def rest(self, made: int, budget: int | None = None) -> float:
        return super().rest(made) if budget is None else float(budget)


class Worker:
    """`lost`: its machine is gone, which the coordinator does not know yet. `promised`: on their way to it."""

    def __init__(self, name: str, engine: Engine, speed: WorkerThroughput) -> None:
        self.name, self.engine, self.speed = name, engine, speed
        self.lost = False
        self.promised = 0
        self.stamp = 0


class World:
    def __init__(self, events: Sequence[FleetEvent], until: float, policy: Policy, setting: Setting) -> None:
        self._policy, self._until = policy, until
        setting = costless(setting) if policy.knows else setting
        self._setting = replace(setting, slots=min(setting.slots, setting.plateau)) if policy.spares else setting
        self._now = 0.0
        self._calendar: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._booting: set[str] = set()
        self._workers: dict[str, Worker] = {}
        self._line = RolloutQueue()
        self._rollouts: dict[str, Rollout] = {}
        self._travelling: dict[str, Worker | None] = {}
        self._lengths = Foretold() if policy.knows else ResponseLengths()
        self._tick_at = inf
        self._draw = Random(setting.seed)
        self.result = Result(policy=policy.name)
        for event in events:
            self._at(event.t_s, self._join_later(event.node) if event.joins else self._lose(event.node))

    def run(self, steps: Sequence[Sequence[int]]) -> Result:
        """Run the steps one after the other until the trace ends."""
        for number, lengths in enumerate(steps):
            self._submit(number, sorted(lengths, reverse=True) if self._policy.knows else lengths)
            while self._rollouts:
                if not self._calendar or self._calendar[0][0] > self._until:
                    self._abandon()
                    return self.result
                self._turn()
            self.result.ends.append(self._now)
            self._now += self._setting.gap_s
        return self.result

    def _turn(self) -> None:
        """Take all events of the next instant, then decide."""
        self._now = max(self._now, self._calendar[0][0])
        while self._calendar and self._calendar[0][0] <= self._now:
            heappop(self._calendar)[2]()
        self._dispatch()

    def _at(self, when: float, what: Callable[[], None]) -> None:
        heappush(self._calendar, (when, next(self._numbers), what))

    # The fleet.

    def _join_later(self, node: str) -> Callable[[], None]:
        def add() -> None:
            self._booting.add(node)
            self._at(self._now + self._setting.boot_s + self._setting.pull_s, serve)

        def serve() -> None:
            if node in self._booting:
                self._booting.discard(node)
                factor = 1.0 + self._setting.spread * Random(f"{self._setting.seed} {node}").uniform(-1.0, 1.0)
                speed = WorkerThroughput(weigh_context=self._policy.weighted) if self._policy.learnt else Unlearnt()
                self._workers[node] = Worker(node, Engine(self._setting, self._now, factor), speed)
                self._wake()

        return add

    def _lose(self, node: str) -> Callable[[], None]:
        def lose() -> None:
            self._booting.discard(node)
            worker = self._workers.get(node)
            if worker is None:
                return
            self._advance(worker)
            worker.lost = True
            held = worker.engine.lose(self._now)
            self._at(self._now + self._setting.detection_s, lambda: self._noticed(worker, held))

        return lose

    def _noticed(self, worker: Worker, held: list[Rollout]) -> None:
        if self._workers.get(worker.name) is worker:
            del self._workers[worker.name]
        self.result.losses += 1
        for rollout in [*held, *worker.engine.lose(self._now)]:
            if rollout.made and not self._policy.keeps:
                rollout.twice += rollout.made
                rollout.made = 0.0
            self._travel(rollout, None)

    # Rollouts.

    def _submit(self, number: int, lengths: Sequence[int]) -> None:
        for place_in_line, length in enumerate(lengths):
            rollout = Rollout(number * len(lengths) + place_in_line, length)
            self._rollouts[str(rollout.number)] = rollout
            self._queue(rollout)
        self._dispatch()

    def _queue(self, rollout: Rollout, prefer: str = "") -> None:
        self._line.add(
            QueuedRollout(
                rollout_id=str(rollout.number),
                episode_id=str(rollout.number),
                bounds=_BOUNDS,
                length=self._setting.prompt_tokens + int(rollout.made),
                place=rollout.number,
                since=self._now,
                prefer=prefer,
            )
        )

    def _travel(self, rollout: Rollout, target: Worker | None) -> None:
        """Back into line once it was handed over; `target` is who will be preferred for it."""
        key = str(rollout.number)
        self._travelling[key] = target
        if target is not None:
            target.promised += 1

        def arrive() -> None:
            del self._travelling[key]
            if target is not None:
                target.promised -= 1
            self._queue(rollout, target.name if target else "")

        self._at(self._now + self._setting.handover_s, arrive)

    def _dispatch(self) -> None:
        if not len(self._line) or not self._workers:
            return
        slots = self._setting.slots if self._policy.delays else self._setting.rollouts
        workers = [worker for worker in self._workers.values() if len(worker.engine) < slots]
        hosts = [self._rated(worker, slots) for worker in workers]
        placements = place(self._line, hosts, {}, pending_limit=pending_limit if self._policy.delays else _slots)
        for rollout_id, name in placements:
            self._line.remove(rollout_id)
            rollout, worker = self._rollouts[rollout_id], self._workers[name]
            self._advance(worker)
            worker.engine.give(rollout, self._now, prefill=rollout.attempts > 0)
            rollout.attempts += 1
        for name in {name for _, name in placements}:
            self._expect(self._workers[name])
        if placements:
            self._wake()
        if placements and len(self._line):  # once those have started, their workers may have more
            for ready in {self._now, *(self._workers[name].engine.ready for _, name in placements)}:
                self._at(max(self._now, ready) + self._setting.start_s, lambda: None)

    def _host(self, worker: Worker, slots: int, *, promised: int = 0) -> HostView:
        return HostView(
            worker_id=worker.name,
            name=worker.name,
            slots=slots,
            running=len(worker.engine) + promised,
            pending=worker.engine.pending(self._now),
            installed=1,
            target=1,
            max_model_len=_CONTEXT,
        )

    def _rated(self, worker: Worker, slots: int) -> HostView:
        if not self._policy.delays:  # the shortest queue alone decides
            return self._host(worker, slots)
        running, context = len(worker.engine), worker.engine.context()
        rate, plateau = worker.speed.rate(running + 1, context), worker.speed.plateau(context)
        return replace(self._host(worker, slots), rate=rate, plateau=plateau)

    def _advance(self, worker: Worker) -> None:
        """Bring a worker's engine up to now; whoever ended, ended."""
        if worker.lost:
            return
        span = worker.engine.advance(self._now)
        if span.seconds >= _SPAN_S and span.running:
            worker.speed.observe(span.running, span.context, round(span.tokens), span.seconds)
        for rollout in worker.engine.finished(self._now):
            del self._rollouts[str(rollout.number)]
            self._lengths.finished(rollout.length)
            self.result.ended(rollout)
            self._wake(_ENDED_TICK_S)

    def _expect(self, worker: Worker) -> None:
        """Put into the calendar when the worker's next rollout ends."""
        worker.stamp += 1
        stamp, when = worker.stamp, worker.engine.next_end()
        if worker.lost or when == inf:
            return

        def end() -> None:
            if worker.stamp == stamp and not worker.lost:
                self._advance(worker)
                self._expect(worker)

        self._at(when, end)

    # Balance.

    def _wake(self, after_s: float | None = None) -> None:
        """See to the balance, a tick from now unless it is to be seen to before."""
        when = self._now + (self._setting.tick_s if after_s is None else after_s)
        if self._policy.balances and when < self._tick_at:
            self._tick_at = when
            self._at(when, self._tick)

    def _tick(self) -> None:
        if self._now < self._tick_at:
            return  # an earlier one has been put in since
        self._tick_at = inf
        if self._rollouts:
            self._wake(_IDLE_TICK_S)
        if len(self._line):
            return
        slots = self._setting.slots if self._policy.delays else self._setting.rollouts
        engines = [self._engine(worker, slots) for worker in self._workers.values()]
        costs, unstarted = self._policy.costs, self._policy.unstarted
        moves = rollout_moves.rebalance(engines, self._lengths, now=self._now, costs=costs, unstarted=unstarted)
        for move in moves:
            self._move(move.attempt_id, self._workers[move.source], self._workers[move.target])
        for name in {move.source for move in moves}:
            self._expect(self._workers[name])
        if moves:
            self._wake()

    def _engine(self, worker: Worker, slots: int) -> rollout_moves.EngineLoad:
        return rollout_moves.EngineLoad(
            host=self._host(worker, slots, promised=worker.promised),
            speed=worker.speed,
            context=worker.engine.context(),
            rollouts=lambda: self._generating(worker),
        )

    def _generating(self, worker: Worker) -> list[rollout_moves.RunningRollout]:
        self._advance(worker)
        self._expect(worker)
        engine = worker.engine
        found = []
        for rollout in (*engine.running, *engine.queue):
            made = int(engine.made(rollout))
            length = self._setting.prompt_tokens + made
            found.append(
                rollout_moves.RunningRollout(
                    attempt_id=str(rollout.number),
                    rollout=QueuedRollout(
                        rollout_id=str(rollout.number),
                        episode_id=str(rollout.number),
                        bounds=_BOUNDS,
                        length=length,
                        place=rollout.number,
                    ),
                    length=length,
                    made=made,
                    budget=max(0, rollout.length - made) if self._policy.knows else _CONTEXT,
                    since=rollout.given,
                    started=engine.started(rollout, self._now),
                )
            )
        return found

    def _move(self, rollout_id: str, source: Worker, target: Worker) -> None:
        if source.lost:
            return  # it will be missed when the loss is noticed
        rollout = self._rollouts[rollout_id]
        source.engine.release(rollout, self._now)
        self.result.moves += 1
        self._travel(rollout, target)

    def _abandon(self) -> None:
        """The trace is over: count what the unfinished step made so far."""
        for worker in self._workers.values():
            if not worker.lost:
                worker.engine.advance(self._until)
                for rollout in worker.engine.running:
                    rollout.made = worker.engine.made(rollout)
        for rollout in self._rollouts.values():
            self.result.unfinished += rollout.made
            self.result.twice += rollout.twice
