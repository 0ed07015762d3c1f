"""Quarantines workers that are lost too often.

Invariant: a worker has one strike for each short attachment that it lost without notice, unless a large part of the
fleet was lost with it: then the network or the coordinator failed. All strikes are forgiven `_FORGIVEN_S` after the
last. Lost with the process: all workers start without strikes.
"""

from collections import deque
from typing import Final, NamedTuple

#: One loss may be the network's; from the second on the quarantine doubles.
_FREE: Final = 1
_SHORTEST_S: Final = 5.0
_LONGEST_S: Final = 300.0
_FORGIVEN_S: Final = 600.0
#: A longer attachment earns no strike: connections end now and then.
_LASTED_S: Final = 60.0
#: Losses within so long, of so many workers and so large a part of the fleet, have one common cause. They are detected
#: up to a heartbeat and a judgement apart.
_TOGETHER_S: Final = 2.0
_MANY: Final = 3
_LARGE_PART: Final = 0.5


class _Record(NamedTuple):
    strikes: int
    lost: float


class _Loss(NamedTuple):
    worker_id: str
    when: float
    before: _Record | None  # the worker's record before the loss


class Flapping:
    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._attached: dict[str, float] = {}  # since when
        self._lately: deque[_Loss] = deque()

    def attached(self, worker_id: str, now: float) -> None:
        """Note that the worker attached; it may have been attached already."""
        self._attached.setdefault(worker_id, now)

    def left(self, worker_id: str) -> None:
        """Note that the worker left as announced."""
        self._attached.pop(worker_id, None)

    def lost(self, worker_id: str, now: float) -> None:
        """Note that the worker was lost without notice."""
        before = self._record(worker_id, now)
        if now - self._attached.pop(worker_id, now) < _LASTED_S:
            self._records = {name: one for name, one in self._records.items() if now - one.lost < _FORGIVEN_S}
            self._records[worker_id] = _Record(before.strikes + 1 if before else 1, now)
        self._lately.append(_Loss(worker_id, now, before))
        while now - self._lately[0].when > _TOGETHER_S:
            self._lately.popleft()
        gone = {loss.worker_id for loss in self._lately}
        if len(gone) >= max(_MANY, _LARGE_PART * len(gone | self._attached.keys())):
            self._take_back()

    def _take_back(self) -> None:
        for loss in reversed(self._lately):
            if loss.before is None:
                self._records.pop(loss.worker_id, None)
            else:
                self._records[loss.worker_id] = loss.before

    def quarantined_s(self, worker_id: str, now: float) -> float:
        """For how much longer the worker gets no work; 0.0 if it is trusted."""
        record = self._record(worker_id, now)
        if record is None or record.strikes <= _FREE:
            return 0.0
        pause = min(_LONGEST_S, _SHORTEST_S * 2.0 ** min(record.strikes - _FREE - 1, 16))
        return max(0.0, record.lost + pause - now)

    def quarantined(self, now: float) -> set[str]:
        """The workers that get no work now."""
        return {worker_id for worker_id in self._records if self.quarantined_s(worker_id, now)}

    def _record(self, worker_id: str, now: float) -> _Record | None:
        record = self._records.get(worker_id)
        return record if record is not None and now - record.lost < _FORGIVEN_S else None
