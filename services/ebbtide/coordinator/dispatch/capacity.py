"""Decides how many rollouts a worker's memory has room for."""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from msgspec import Struct

from ebbtide.coordinator.forecasts.length_learner import LengthCurve
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_reports import HeartbeatReport
from ebbtide.coordinator.state.worker_session import WorkerSession

#: Lengths of responses for which the peak is tabulated, each so many times the one before.
_GROWTH: Final = 1.25
_SHORTEST: Final = 32.0
_STEPS: Final = 52  # up to some million tokens
#: Share of the memory that is planned for: blocks are not filled to their ends, and sums of few rollouts vary.
_FILLED: Final = 0.95


class PeakTokens:
    """The most tokens that a rollout will probably hold at one moment, by the tokens that it has made.

    A table for prompts of one length, made once; `lengths` may change afterwards.
    """

    def __init__(self, lengths: LengthCurve, prompt: float) -> None:
        self._made = [0.0, *(_SHORTEST * _GROWTH**step for step in range(_STEPS))]
        alive = lengths.outlasting(self._made)
        held = [share * (prompt + made) for share, made in zip(alive, self._made, strict=True)]
        #: At the end of the table backwards: the most that is held from there on, for each that gets so far.
        most = list(accumulate(reversed(held), max))[::-1]
        self._peaks = [one / share if share > 0.0 else 0.0 for one, share in zip(most, alive, strict=True)]
        self._prompt = prompt

    def of(self, made: float) -> float:
        """Tokens of prompt and response; `made`: of the response, so far. Interpolated between the table's lengths."""
        at = bisect_right(self._made, made)
        if at == len(self._made):
            return self._prompt + made
        low, high = self._made[at - 1], self._made[at]
        share = (made - low) / (high - low)
        return max(self._prompt + made, self._peaks[at - 1] + share * (self._peaks[at] - self._peaks[at - 1]))


def memory_slots(peaks: PeakTokens, *, kv_tokens: int, most: int, running: int, made: float) -> int:
    """The slots that a worker offers: its `running` rollouts, and as many new ones as its memory has room for. If it
    has none, the running ones are not replaced while they are more than would fit if all were new.

    `kv_tokens`: that fit into its memory, 0 if it does not say; `most`: the slots that it is set to; `made`: tokens of
    the running rollouts' responses, on average. At least one: a rollout that fits nowhere else has to run alone.

    Each rollout is counted with the most tokens that it will probably hold at one moment: a response that grows needs
    more later, and one that may end soon needs that less probably. For rollouts that began together the sum is the peak
    of their memory. For rollouts of all ages it is somewhat more than they hold at a time (a tenth, if lengths are
    exponential).

    A worker with fewer slots than its memory holds rollouts makes fewer tokens than it could. With more, rollouts wait
    in its engine for memory while other workers have room, or are preempted and read again.
    """
    if not kv_tokens:
        return most
    memory, new = _FILLED * kv_tokens, max(1.0, peaks.of(0.0))
    room = memory - running * peaks.of(made)
    slots = running + int(room / new) if room >= 0.0 else min(running, int(memory / new))
    return max(1, min(most, slots))


#: A run's lengths change little within this.
_TABLE_S: Final = 2.0
#: Workers whose rollouts are summed up in one step.
_PART: Final = 100


class _Table(Struct):
    peaks: PeakTokens
    made: float  # when
    prompts: float = 0.0  # tokens of prompts, over the rollouts counted since then
    rollouts: int = 0

    @property
    def prompt(self) -> float:
        return self.prompts / max(1, self.rollouts)


class SlotLimits:
    """Has each worker offer as many slots as its memory holds rollouts of its run, up to those that it is set to.

    Invariant: `_beats` has the last heartbeat of each worker that was looked at, and `_peaks` a table for each run.
    Lost with the process: a worker's own slots count until it is heard of again.
    """

    def __init__(self, state: CoordinatorState) -> None:
        self._state = state
        self._beats: dict[str, HeartbeatReport] = {}  # by session
        self._peaks: dict[str, _Table] = {}  # by run

    def update(self, now: float) -> Iterator[None]:
        """Look at the workers that were heard of since the last call, some in each step: others have their turn."""
        sessions = [one for one in self._state.sessions.values() if one.hello.engine.kv_tokens]
        self._beats = {one.session_id: beat for one in sessions if (beat := self._beats.get(one.session_id))}
        self._peaks = {run_id: table for run_id, table in self._peaks.items() if run_id in self._state.runs}
        fresh = [one for one in sessions if self._beats.get(one.session_id) is not one.beat]
        for at, session in enumerate(fresh, 1):
            self._beats[session.session_id] = session.beat
            if (run := self._state.runs.get(session.run_id)) is not None:
                self._offer(session, run, now)
            if not at % _PART:
                yield

    def _offer(self, session: WorkerSession, run: RunState, now: float) -> None:
        attempts = session.attempts.values()
        made = sum(one.stored for one in attempts)
        table = self._table(run, now)
        table.prompts += sum(one.length for one in attempts) - made
        table.rollouts += len(attempts)
        running = len(attempts)
        slots = memory_slots(
            table.peaks,
            kv_tokens=session.hello.engine.kv_tokens,
            # More than wait there already could not start, and would be of no use elsewhere.
            most=min(session.hello.slots, max(1, running)) if session.beat.unadmitted else session.hello.slots,
            running=running,
            made=made / max(1, running),
        )
        session.offer(slots)

    def _table(self, run: RunState, now: float) -> _Table:
        known = self._peaks.get(run.run_id)
        if known is None:
            waiting = next(iter(run.queue), None)
            prompt = float(waiting.length - waiting.made) if waiting is not None else 0.0
            known = self._peaks[run.run_id] = _Table(PeakTokens(run.lengths.curve, prompt), now)
        elif now - known.made >= _TABLE_S and known.rollouts:
            known = self._peaks[run.run_id] = _Table(PeakTokens(run.lengths.curve, known.prompt), now)
        return known
