"""Divides rollouts into chunks of one size, as Seer does (arXiv 2511.14617 v3, OSDI'26)."""

from collections.abc import Sequence
from typing import Final, Literal

from benchmarks.rivals.seer_start_rule import BufferedRequest, SeerStartRule
from benchmarks.rivals.tail.chunk_places import ChunkPlace, chunk_place
from benchmarks.rivals.tail.divided_decider import DividedDecider
from benchmarks.rivals.tail.divided_policy import DividedPolicy
from benchmarks.rivals.tail.kv_pool import KvPool
from benchmarks.rivals.tail.speculation_pace import SpeculationPace
from benchmarks.rivals.tail.step_members import EngineView, StepMember
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.simulator.scenario.quantity_spec import Tokens
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator

#: A round comes late by its pause, so a chunk's memory has so many tokens more for each second of it.
_LATE_TOKENS_PER_S: Final = 64


class SeerDecider(DividedDecider):
    """`chunk`: tokens; `order`: of the requests that wait.

    Invariant: a member that runs has memory up to `until`, and each engine's members together have no more than there
    is.
    """

    def __init__(
        self,
        coordinator: VirtualCoordinator,
        *,
        chunk: int,
        order: str,
        round_s: float,
        pool: KvPool | None,
        pace: SpeculationPace | None,
    ) -> None:
        super().__init__(coordinator, round_s=round_s, pool=pool, pace=pace)
        self._chunk, self._order = chunk, order
        self._spare = round(_LATE_TOKENS_PER_S * round_s)
        self._rule = SeerStartRule(cap=1 << 30)  # beyond every response, so it may be any run's

    def divide(self, run: RunState, views: Sequence[EngineView], now: float) -> None:
        for one in self.members.ended:
            self._rule.finished(one.group, one.length)
        over = {one.rollout_id: view for view in views for one in view.members if one.made >= one.until}
        returned = [one for view in views for one in view.members if one.rollout_id in over]
        if self.members.waiting or returned:
            self._fill(run, views, over, returned, now)

    def _fill(
        self,
        run: RunState,
        views: Sequence[EngineView],
        over: dict[str, EngineView],
        returned: Sequence[StepMember],
        now: float,
    ) -> None:
        """Give memory to chunks in order, until the first one that fits nowhere."""
        places = [self._place(view, over) for view in views]
        by_id = {view.session.session_id: view for view in views}
        starts, left = list[tuple[StepMember, EngineView]](), {one.rollout_id: one for one in returned}
        for one in sorted([*self.members.waiting, *returned], key=self._rank):
            until = min(one.cap, one.made + self._chunk)
            needed = one.prompt + until + self._spare
            place = chunk_place(places, needed, one.home)
            if place is None:
                break
            place.take(needed)
            source, target = over.get(one.rollout_id), by_id[place.session_id]
            if source is None:
                one.until = until
                starts.append((one, target))
                continue
            del left[one.rollout_id]
            if source is target:
                one.until = until
            else:
                self.stop(source, [one], target)
        for one in left.values():
            self.stop(over[one.rollout_id], [one])
        self.start(run, starts, now)

    def _place(self, view: EngineView, over: dict[str, EngineView]) -> ChunkPlace:
        stay = [one for one in view.members if one.rollout_id not in over]
        taken = sum(one.prompt + one.until + self._spare for one in stay)
        return ChunkPlace(
            session_id=view.session.session_id,
            running=len(stay),
            slots=view.slots,
            free=view.kv_tokens - taken - view.leaving,
        )

    def _rank(self, one: StepMember) -> tuple[int, int, int]:
        if self._order == "queue":
            return 0, 0, one.place
        if self._order == "true_lengths":
            return 0, one.made - one.length, one.place
        return self._rule.rank(BufferedRequest(one.place, one.group, one.made, one.probe))


class SeerPolicy(DividedPolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seer as published: chunks that memory is kept for, a pool of keys and values, probes first, grouped speculation.

    It is not told lengths before a response ends, unless `order` says so. Its guard against starvation, of which the
    paper gives no rule, is left out. Speculation is a model (`speculation_pace`).
    """

    chunk: Tokens = 8192  # notes on the first version have 8K; the later ones do not state it
    order: Literal["context", "queue", "true_lengths"] = "context"

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        return SeerDecider(
            coordinator,
            chunk=self.chunk,
            order=self.order,
            round_s=self.round_s,
            pool=self.pool(),
            pace=self.pace(coordinator),
        )
