"""Which workers come and go too often to be given work.

Invariant: a worker has one strike per loss that it did not announce, and all of them are forgiven once it has stayed
for `_FORGIVEN_S`. Lost with the process: everybody starts anew with none.
"""

from typing import Final

from msgspec import Struct

#: One loss may be the network's; from the second one on, the pause doubles.
_FREE: Final = 1
_SHORTEST_S: Final = 5.0
_LONGEST_S: Final = 300.0
_FORGIVEN_S: Final = 600.0


class _Record(Struct):
    strikes: int
    lost: float


class Flapping:
    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def lost(self, worker_id: str, now: float) -> None:
        """The worker went without a word. One that announced its leave is not to be reported."""
        record = self._record(worker_id, now)
        if record is None:
            self._records[worker_id] = _Record(1, now)
        else:
            record.strikes += 1
            record.lost = now

    def shunned_s(self, worker_id: str, now: float) -> float:
        """For how much longer the worker is to get no work; 0.0 if it may have some."""
        record = self._record(worker_id, now)
        if record is None or record.strikes <= _FREE:
            return 0.0
        pause = min(_LONGEST_S, _SHORTEST_S * 2.0 ** min(record.strikes - _FREE - 1, 16))
        return max(0.0, record.lost + pause - now)

    def _record(self, worker_id: str, now: float) -> _Record | None:
        record = self._records.get(worker_id)
        if record is not None and now - record.lost >= _FORGIVEN_S:
            del self._records[worker_id]
            return None
        return record
