"""A fleet in simulated time that is shared by the very code that shares the real one: workers that make tokens, change
over and stand still meanwhile, and runs that always have work, or have it at times.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from ebbtide.coordinator.rules.fair_share import (
    REST,
    Demand,
    RunDue,
    ShareAccounts,
    WorkerDemand,
    WorkerPost,
    allot,
    entitled,
)


@dataclass
class Worker:
    run_id: str = ""
    has: str = ""
    since: float = -1e9
    ready: float = 0.0
    rate: float = 100.0
    unfit: frozenset[str] = frozenset()


@dataclass
class Fleet:
    """`wants` tells at each moment how many workers a run could use; all of them if it does not say."""

    runs: list[Demand]
    workers: list[Worker]
    change_s: float = 0.1
    step_s: float = 0.1
    timeslice_s: float = 2.0
    wants: Callable[[str, float], float] = lambda _run_id, _now: 1e9
    now: float = 0.0
    tokens: Counter[str] = field(default_factory=Counter)
    changes: int = 0
    idle_s: float = 0.0

    def __post_init__(self) -> None:
        self._accounts, self._wants = ShareAccounts(self.now), WorkerDemand()
        self._made: Counter[str] = Counter()
        self._due: dict[str, RunDue] = {}
        self._starved: dict[str, float] = {}

    def run(self, seconds: float) -> Counter[str]:
        """Tokens of each run in the next so many seconds."""
        before = Counter(self.tokens)
        for _ in range(round(seconds / self.step_s)):
            self.step()
        return self.tokens - before

    def step(self) -> None:
        wanted = {one.run_id: self.wants(one.run_id, self.now) for one in self.runs}
        for run_id, want in wanted.items():
            mine = [one for one in self.workers if one.run_id == run_id and one.ready <= self.now]
            for worker in mine:
                used = min(1.0, want / len(mine))
                made = worker.rate * self.step_s * used
                self._made[run_id] += round(made)
                self.tokens[run_id] += round(made)
                self.idle_s += self.step_s * (1.0 - used)
        self.now += self.step_s
        self._decide(wanted)

    def _decide(self, wanted: Mapping[str, float]) -> None:
        working = [one for one in self.workers if one.ready <= self.now]
        resting = sum(one.run_id == REST for one in self.workers)
        turn_s = max(self.timeslice_s, 10 * self.change_s)
        self._accounts.tick(self._made, self._due, workers=len(working), resting=resting, turn_s=turn_s, now=self.now)
        self._made.clear()
        believed = self._wants.believed(wanted, change_s=self.change_s, now=self.now)
        demands = [self._demand(one, believed[one.run_id]) for one in self.runs if one.run_id in believed]
        shares = entitled(demands, len(self.workers))
        posts = [
            WorkerPost(
                session_id=f"w{number:04}",
                run_id=one.run_id,
                since=one.since,
                running=1,
                has=one.has,
                unfit=one.unfit,
                change_s=self.change_s,
            )
            for number, one in enumerate(self.workers)
        ]
        allotted = allot(
            posts, demands, now=self.now, timeslice_s=self.timeslice_s, rest_owed_s=self._accounts.owed_s(REST)
        )
        held = Counter(allotted.values())
        self._due = {
            run_id: RunDue(share, waits=wanted[run_id] > held[run_id] + 1e-9) for run_id, share in shares.items()
        }
        for worker, run_id in zip(self.workers, allotted.values(), strict=True):
            if worker.run_id != run_id:
                self._change(worker, run_id)

    def _demand(self, run: Demand, wants: float) -> Demand:
        served = any(one.run_id == run.run_id for one in self.workers)
        self._starved[run.run_id] = 0.0 if served else self._starved.get(run.run_id, 0.0) + self.step_s
        return msgspec.structs.replace(
            run, wants=wants, owed_s=self._accounts.owed_s(run.run_id), starved_s=self._starved[run.run_id]
        )

    def _change(self, worker: Worker, run_id: str) -> None:
        worker.run_id, worker.since = run_id, self.now
        if run_id not in {REST, worker.has}:
            self.changes += worker.has != ""
            worker.has, worker.ready = run_id, self.now + self.change_s


def fleet(runs: list[Demand], workers: int, **more: object) -> Fleet:
    return Fleet(runs, [Worker() for _ in range(workers)], **more)  # type: ignore[arg-type]
