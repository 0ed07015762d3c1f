"""Replays traces under policies, at equal work: every job does the same rounds, however long it takes for them."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from benchmarks.jobs.job_traces import ROLLOUT_PRICE, TRAIN_PRICE, TYPES, TraceEntry, rounds, width
from benchmarks.rivals.rlix_pool import PooledTimes, replay_pool
from benchmarks.rivals.rollmux_policy import RollMuxPolicy
from ebbtide.coordinator.rules.phase_turns import NO_MERGING, Returning, TailMerging, Waiter
from ebbtide.coordinator.rules.run_groups import Move, RunGroup, Terms
from ebbtide.simulator.shared_devices import (
    DevicePolicy,
    Job,
    SharedDevices,
    SharedOutcome,
    TurnsPolicy,
    seated_alone,
)

_ROOT: Final = Path(__file__).parents[2]
#: What a replay's result depends on.
_CODE: Final = (
    "services/ebbtide/coordinator/forecasts/phase_times.py",
    "services/ebbtide/coordinator/rules/phase_turns.py",
    "services/ebbtide/coordinator/rules/run_groups.py",
    "lab/ebbtide/simulator/shared_devices.py",
    "benchmarks/rivals/rollmux_policy.py",
    "benchmarks/jobs/replays.py",
)
#: Host memory of a node, in bytes: two terabytes, the upper end of what the paper names.
_MEMORY: Final = 2 * 10**12
#: A quarter of a rollout's time in which a quarter of its unit suffices: with it two equal rollouts in turn take 0.81
#: of the time, within the gains of 1.06 to 1.28 that RollMux measured for its migration.
MERGING: Final = TailMerging(share=0.25, kept=0.25)


class AlonePolicy:
    """Each job has its own nodes."""

    merging = NO_MERGING
    review_every_s = inf

    def arrived(self, job: Job, groups: Mapping[str, RunGroup]) -> RunGroup:  # noqa: ARG002
        return seated_alone(job.name, job.name, job.width)

    def left(self, name: str) -> None: ...

    def turn(self, waiters: Sequence[Waiter], returning: Sequence[Returning]) -> int:  # noqa: ARG002
        return 0

    def trained(self, name: str, rollout_s: float, train_s: float, alone_s: float, took_s: float) -> None: ...

    def review(self, groups: Mapping[str, RunGroup], left: Sequence[str]) -> list[Move]:  # noqa: ARG002
        return []


def terms(merging: TailMerging = NO_MERGING) -> Terms:
    return Terms(
        rollout_price=ROLLOUT_PRICE,
        train_price=TRAIN_PRICE,
        rollout_memory=_MEMORY,
        train_memory=_MEMORY,
        merging=merging,
    )


POLICIES: Final[Mapping[str, Callable[[Terms], DevicePolicy]]] = {
    "alone": lambda _: AlonePolicy(),
    "rollmux": lambda under: RollMuxPolicy(under, merging=under.merging),
    "rollmux_unpruned": lambda under: RollMuxPolicy(under, merging=under.merging, prunes=False),
    "ebbtide": TurnsPolicy,
}


class Replayed(Struct, frozen=True):
    """Money in dollars; slowdowns against the time that the same rounds take alone."""

    price: float
    rounds: int
    price_per_round: float
    slowdown: float  # of all jobs' time
    missed: int  # jobs beyond their bounds
    worst_over_bound: float
    jobs: int
    moves: int


class Replays:
    """Replays that are kept below a folder, so that a benchmark which was interrupted goes on where it was.

    Invariant: a file's name is a digest of all that its content depends on: the code, the jobs, the terms, the policy.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Without a folder nothing is kept."""
        self._folder = folder
        self._code = _code_digest() if folder is not None else b""

    def replay(self, name: str, jobs: Sequence[Job], under: Terms) -> Replayed:
        """One policy over one trace."""
        if self._folder is None:
            return replay(name, jobs, under)
        digest = hashlib.blake2b(self._code + name.encode(), digest_size=12)
        digest.update(msgspec.msgpack.encode((jobs, under)))
        path = self._folder / f"{digest.hexdigest()}.json"
        if path.exists():
            return msgspec.json.decode(path.read_bytes(), type=Replayed)
        found = replay(name, jobs, under)
        self._folder.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".part")
        beside.write_bytes(msgspec.json.encode(found))
        beside.replace(path)
        return found


def replay(name: str, jobs: Sequence[Job], under: Terms) -> Replayed:
    """One policy over one trace."""
    return told(SharedDevices(jobs, POLICIES[name](under), under).run(), jobs)


def _code_digest() -> bytes:
    digest = hashlib.blake2b(digest_size=12)
    for name in _CODE:
        digest.update((_ROOT / name).read_bytes())
    return digest.digest()


def told(outcome: SharedOutcome, jobs: Sequence[Job]) -> Replayed:
    bounds = {job.name: job.max_slowdown for job in jobs}
    ends = outcome.ends
    # Times are sums of floats, and jobs with a bound of 1 exist.
    over = [end.slowdown / bounds[name] for name, end in ends.items()]
    done = sum(end.rounds for end in ends.values())
    return Replayed(
        price=outcome.price,
        rounds=done,
        price_per_round=outcome.price / max(1, done),
        slowdown=sum(end.took_s for end in ends.values()) / sum(end.alone_s for end in ends.values()),
        missed=sum(one > 1.0 + 1e-9 for one in over) + len(outcome.refused),
        worst_over_bound=max(over),
        jobs=len(jobs),
        moves=sum(end.moves for end in ends.values()),
    )


def colocated(trace: Sequence[TraceEntry], jobs: Sequence[Job]) -> Replayed:
    """Each job alone on trainer nodes, for rollouts too. Its slowdown is that against its own pair of nodes."""
    price = took = alone = 0.0
    done = missed = 0
    worst = 0.0
    for entry, job in zip(trace, jobs, strict=True):
        seconds = job.cold_s + rounds(entry) * TYPES[entry.type].colocated_s
        price += seconds * width(entry) * TRAIN_PRICE / 3600.0
        took, alone, done = took + seconds, alone + job.alone_s, done + rounds(entry)
        missed += seconds > job.max_slowdown * job.alone_s
        worst = max(worst, seconds / job.alone_s / job.max_slowdown)
    return Replayed(price, done, price / done, took / alone, missed, worst, len(jobs), 0)


def pooled(trace: Sequence[TraceEntry], jobs: Sequence[Job], share: float) -> Replayed:
    """RLix's rule over trainer nodes."""
    times = {entry.name: PooledTimes(*TYPES[entry.type][2:]) for entry in trace}
    return told(replay_pool(jobs, times, node_price=TRAIN_PRICE, share=share), jobs)
