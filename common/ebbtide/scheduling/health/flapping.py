"""Which workers come and go too often to be given work.

Invariant: a worker has one strike for each short life that it ended without a word, unless a large part of the fleet
went with it: that was the network, or the coordinator. All of its strikes are forgiven `_FORGIVEN_S` after the last.
Lost with the process: everybody starts anew with none.
"""

from collections import deque
from typing import Final, NamedTuple

#: One loss may be the network's; from the second one on, the pause doubles.
_FREE: Final = 1
_SHORTEST_S: Final = 5.0
_LONGEST_S: Final = 300.0
_FORGIVEN_S: Final = 600.0
#: Who stayed for so long brought more than it cost: connections end now and then.
_LASTED_S: Final = 60.0
#: Losses within so long, of so many workers and so large a part of the fleet, have one cause that is none of them.
#: Those that one cause silences are found a heartbeat and a look apart.
_TOGETHER_S: Final = 2.0
_MANY: Final = 3
_LARGE_PART: Final = 0.5


class _Record(NamedTuple):
    strikes: int
    lost: float


class _Loss(NamedTuple):
    """`before`: what was held against the worker before it."""

    worker_id: str
    when: float
    before: _Record | None


class Flapping:
    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._attached: dict[str, float] = {}  # since when
        self._lately: deque[_Loss] = deque()

    def attached(self, worker_id: str, now: float) -> None:
        """The worker is there. One that was there already, and was not reported since, goes on with its life."""
        self._attached.setdefault(worker_id, now)

    def left(self, worker_id: str) -> None:
        """The worker went as it had announced."""
        self._attached.pop(worker_id, None)

    def lost(self, worker_id: str, now: float) -> None:
        """The worker went without a word."""
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

    def shunned_s(self, worker_id: str, now: float) -> float:
        """For how much longer the worker is to get no work; 0.0 if it may have some."""
        record = self._record(worker_id, now)
        if record is None or record.strikes <= _FREE:
            return 0.0
        pause = min(_LONGEST_S, _SHORTEST_S * 2.0 ** min(record.strikes - _FREE - 1, 16))
        return max(0.0, record.lost + pause - now)

    def _record(self, worker_id: str, now: float) -> _Record | None:
        record = self._records.get(worker_id)
        return record if record is not None and now - record.lost < _FORGIVEN_S else None
