"""RLix's priority rule, over one homogeneous pool: training goes first, generation takes what is left.

RLix (rlops/rlix, a third-party plug-in of ROLL) gives the GPUs of one pool to several pipelines by the priority of
their stages. Training takes its nodes at once, from generation where need be, in the order of waiting; generation is
preemptible worker by worker, and its pipelines share the rest by their remaining samples. Here nodes are shared in
fractions, preemption costs nothing, generation speeds up to twice its own nodes, and the pool grows and shrinks with
the jobs that are there: all of that is in its favour.
"""

from collections.abc import Mapping, Sequence
from math import ceil, inf
from typing import Final, NamedTuple

from ebbtide.simulator.shared_devices import Job, JobEnd, SharedOutcome

_FASTEST: Final = 2.0
_DONE: Final = 1e-9


class PooledTimes(NamedTuple):
    """Seconds of a round on the pool's nodes."""

    rollout_s: float
    train_s: float


class _Pooled:
    __slots__ = ("job", "left", "rate", "rounds", "since", "times", "training")

    def __init__(self, job: Job, times: PooledTimes) -> None:
        self.job, self.times = job, times
        self.rounds, self.training, self.since, self.rate = 0, False, job.arrive_s, 0.0
        self.left = times.rollout_s * job.width + job.cold_s * job.width  # node-seconds


def replay_pool(
    jobs: Sequence[Job], times: Mapping[str, PooledTimes], *, node_price: float, share: float
) -> SharedOutcome:
    """Play jobs over a pool with this share of the nodes that they would have alone; times of all rounds are equal."""
    arrivals = sorted(jobs, key=lambda job: job.arrive_s, reverse=True)
    active: list[_Pooled] = []
    ends: dict[str, JobEnd] = {}
    now = price = 0.0
    while arrivals or active:
        nodes = _rates(active, share)
        begin = arrivals[-1].arrive_s if arrivals else inf
        end = min([begin, *(now + one.left / one.rate for one in active if one.rate > 0.0)])
        price += nodes * node_price * (end - now) / 3600.0
        for one in active:
            one.left -= one.rate * (end - now)
        now = end
        if arrivals and now >= begin:
            job = arrivals.pop()
            active.append(_Pooled(job, times[job.name]))
            continue
        for one in [one for one in active if one.left <= _DONE * one.times.rollout_s]:
            if not _next_phase(one, now):
                active.remove(one)
                ends[one.job.name] = JobEnd(one.rounds, now - one.job.arrive_s, one.job.alone_s, 0)
    return SharedOutcome(price, ends, now, [])


def _next_phase(one: _Pooled, now: float) -> bool:
    """Let a job begin its next phase. Returns False after its last one."""
    one.rounds += one.training
    one.training, one.since = not one.training, now
    one.left = (one.times.train_s if one.training else one.times.rollout_s) * one.job.width
    return one.rounds < len(one.job.rollouts)


def _rates(active: Sequence[_Pooled], share: float) -> float:
    """Give out the pool's nodes, and return how many there are."""
    if not active:
        return 0.0
    widths = [one.job.width for one in active]
    nodes = left = float(max(*widths, ceil(share * sum(widths))))
    for one in sorted((one for one in active if one.training), key=lambda one: one.since):
        one.rate = float(one.job.width) if one.job.width <= left else 0.0
        left -= one.rate
    generating = [one for one in active if not one.training]
    samples = sum(one.left for one in generating)
    for one in generating:
        one.rate = min(_FASTEST * one.job.width, left * one.left / samples) if samples > 0.0 else 0.0
    return nodes
