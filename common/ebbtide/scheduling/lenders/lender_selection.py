"""Which serving hosts to borrow, and when to give one up: what one brings against how it disturbs.

Both are shares, so that no number has to be set. What a host brings is its marginal tokens/s, as a share of what it
would make with all its slots full and all of its time: the rollouts that nobody else has a free slot for, dealt to the
hosts that are disturbed least, at the speed learnt, in the share of the time that its guard forecasts. What it costs is
the share of its SLO's error budget that requests beside rollouts used. A host is given up while it costs more than it
brings, after PEARL's lesson (arXiv 2609.35158) that more machines are not always more speed; and at once when the error
budget is used up.

Invariant: a worker is in `_hosts` while it was asked about lately. A host that was given up is quiet, so what it would
cost is not seen any more: it is tried again after a pause, which doubles as long as that goes wrong soon again. Lost
with the process: then all hosts are borrowed, and each is judged anew.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from ebbtide.scheduling.dispatch.throughput import WorkerThroughput

#: A host is borrowed for at least so long before it is given up for what it costs: that is a mean of lately.
_DWELL_S: Final = 30.0
#: And given up for at least so long; the pause doubles up to the second, unless it was good for so many pauses before.
_PAUSE_S: Final = 30.0
_LONGEST_PAUSE_S: Final = 1_800.0
_FORGIVEN: Final = 4.0
#: What costs this much more than it brings is given up; what would bring this much more than it costs is borrowed.
_SURE: Final = 1.25
#: Less of an error budget is chance: no host is given up for it, even if it brings nothing.
_CHANCE: Final = 0.02
#: The rollouts that only borrowed hosts have room for count for half so much later: at the end of a training step few
#: are left, and the next one needs the hosts again.
_HALF_LIFE_S: Final = 60.0
#: A worker that has not been asked about for so long is forgotten.
_REMEMBERED_S: Final = 3_600.0


class Lender(Struct, frozen=True, kw_only=True):
    """A worker beside a serving engine: rollouts that it holds at most, what was learnt of its speed (at mean contexts
    of `context` tokens), and the forecast of its guard: `share` of the next minute in which it may generate,
    `disturbance`: share of the error budget used. `known`: there is such a forecast; without it nothing is judged.
    """

    worker_id: str
    slots: int
    share: float
    disturbance: float
    known: bool = True
    speed: WorkerThroughput | None = None
    context: float = 0.0


class LenderVerdict(NamedTuple):
    """Whether to borrow the host; why not, if not."""

    wanted: bool
    reason: str = ""


class _Host(Struct):
    """`since`: when it was borrowed or given up, or its forecast was not known; `until`: it is not borrowed again
    before; `pause_s`: the last one."""

    since: float
    seen: float
    wanted: bool = True
    reason: str = ""
    until: float = 0.0
    pause_s: float = 0.5 * _PAUSE_S


class LenderSelection:
    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = {}
        self._wanting = 0.0
        self._asked: float | None = None

    def decide(self, lenders: Sequence[Lender], wanting: int, now: float) -> dict[str, LenderVerdict]:
        """The verdict on each worker. `wanting`: rollouts, waiting or with borrowed workers, that no other worker has
        a free slot for. Call it every few seconds.
        """
        brought = self._brought(lenders, self._lately(wanting, now))
        for lender in lenders:
            host = self._hosts.setdefault(lender.worker_id, _Host(now, now))
            host.seen = now
            if not lender.known:
                host.since = now if host.wanted else host.since
            elif host.wanted:
                self._judge(host, lender, brought[lender.worker_id], now)
            elif now >= host.until and brought[lender.worker_id] > _SURE * lender.disturbance:
                host.wanted, host.since, host.reason = True, now, ""
        for worker_id, host in list(self._hosts.items()):
            if now - host.seen > _REMEMBERED_S:
                del self._hosts[worker_id]
        return {one.worker_id: self.verdict(one.worker_id) for one in lenders}

    def verdict(self, worker_id: str) -> LenderVerdict:
        """As it was decided last; a worker that is not known is borrowed."""
        host = self._hosts.get(worker_id)
        return LenderVerdict(host.wanted, host.reason) if host else LenderVerdict(wanted=True)

    def _lately(self, wanting: int, now: float) -> float:
        faded = 0.5 ** ((now - self._asked) / _HALF_LIFE_S) if self._asked is not None else 0.0
        self._asked = now
        self._wanting = max(float(wanting), self._wanting * faded)
        return self._wanting

    def _brought(self, lenders: Sequence[Lender], wanting: float) -> dict[str, float]:
        """Of each host the share of all it could make that is marginal, if the least disturbed are filled first; those
        that are borrowed before those that are not.
        """

        def order(lender: Lender) -> tuple[bool, float, str]:
            host = self._hosts.get(lender.worker_id)
            return host is not None and not host.wanted, lender.disturbance / (lender.share or 1e-9), lender.worker_id

        brought = {}
        for lender in sorted(lenders, key=order):
            taken = min(float(lender.slots), wanting)
            wanting -= taken
            brought[lender.worker_id] = min(1.0, lender.share) * _filled(lender, taken)
        return brought

    def _judge(self, host: _Host, lender: Lender, brought: float, now: float) -> None:
        lasted_s, disturbance = now - host.since, lender.disturbance
        used_up = disturbance >= 1.0
        costs = disturbance > max(_CHANCE, _SURE * brought) and lasted_s >= _DWELL_S
        if not used_up and not costs:
            return
        needed = brought > 0.0 or not lender.share
        if used_up:
            host.reason = "its requests used up their error budget beside rollouts"
        elif needed:
            host.reason = f"it takes {disturbance:.0%} of the error budget, and brings {brought:.0%} of its speed"
        else:
            host.reason = "others have room for all rollouts"
        if needed:
            forgiven = lasted_s > _FORGIVEN * host.pause_s and host.pause_s >= _PAUSE_S
            host.pause_s = _PAUSE_S if forgiven else min(_LONGEST_PAUSE_S, 2.0 * host.pause_s)
        host.wanted, host.since, host.until = False, now, now + (host.pause_s if needed else _PAUSE_S)


def _filled(lender: Lender, rollouts: float) -> float:
    """What the host makes with so many rollouts, as a share of what it makes with all its slots full."""
    if rollouts <= 0.0:
        return 0.0
    if lender.speed is not None and (full := lender.slots * lender.speed.rate(lender.slots, lender.context)):
        return min(1.0, rollouts * lender.speed.rate(max(1.0, rollouts), lender.context) / full)
    return min(1.0, rollouts / lender.slots)
