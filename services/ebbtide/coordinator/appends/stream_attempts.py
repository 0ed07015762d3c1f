"""Finds the mirror's attempts of one append stream by the numbers that its worker gave them.

Invariant: an attempt that was found is kept for its number while it has a worker, for then the run has it as running.
Otherwise, and while the run has unconfirmed attempts, the run is asked by ids. Each flush has most of a worker's
attempts again, and looking them up by ids costs more than all else that is done with them.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.errors import InvalidRequest
from ebbtide.types.append_delta import AppendColumns
from ebbtide.v1 import fleet_pb2
from ebbtide.wire.append_columns import MAX_DELTAS

#: Numbers opened between two looks for attempts that are over without a finish: so many more are in memory.
_OPENED: Final = 64


class FoundAttempts(NamedTuple):
    attempts: Sequence[RunningAttempt | None]  # of each delta; None: the mirror does not have it
    follow_on: bool  # all deltas begin where the mirror says that the stored tokens end


class StreamAttempts:
    def __init__(self) -> None:
        self._known: list[RunningAttempt | None] = [None] * MAX_DELTAS
        self._opened = 0  # numbers, since the last look for attempts that are over

    def opened(self, request: fleet_pb2.AppendRequest) -> None:
        """Note that numbers stand for other attempts from now on."""
        for one in request.opened:
            self._known[one.number] = None
        self._opened += len(request.opened)
        if self._opened >= _OPENED:
            self._opened = 0
            self._known = [one if one is not None and one.session is not None else None for one in self._known]

    def of(self, run: RunState | None, deltas: AppendColumns, places: Sequence[int]) -> FoundAttempts:
        """The attempts of a run's deltas, which are noted to have begun. `places`: of the deltas in their message.
        Raises `InvalidRequest` for more tokens than a rollout may have.
        """
        if run is None:
            return FoundAttempts([None] * len(deltas.numbers), follow_on=False)
        known, sure, follow_on = self._known, not run.unconfirmed, True
        found = [known[number] for number in deltas.numbers]
        for i, (attempt, end, count) in enumerate(zip(found, deltas.ends, deltas.counts, strict=True)):
            if attempt is None or attempt.session is None or not sure:
                attempt = found[i] = known[deltas.numbers[i]] = _running(run, deltas, i)  # noqa: PLW2901 - it is the delta's
                if attempt is None:
                    follow_on = False
                    continue
            if end > attempt.most:
                text = f"more than the rollout's max_tokens ({attempt.max_tokens})"
                raise InvalidRequest(text, field=f"deltas[{places[i]}].tokens")
            if attempt.stored != end - count:
                follow_on = False
            if count and not attempt.started:
                attempt.begin(run.clock())
        self._finished(deltas)
        return FoundAttempts(found, follow_on)

    def _finished(self, deltas: AppendColumns) -> None:
        """Let go of the attempts that their deltas finish."""
        for place in deltas.finishes:
            self._known[deltas.numbers[place]] = None


def _running(run: RunState, deltas: AppendColumns, i: int) -> RunningAttempt | None:
    attempt = run.running.get(deltas.rollouts[i])
    return attempt if attempt is not None and attempt.attempt_id == deltas.attempts[i] else None
