"""Decides as Ebbtide does in the long tail: forecasts of lengths, the order of starts, memory by chunks, drafts.

The coordinator's own round does not call these rules for a whole fleet of modelled engines, so this policy calls them
itself: `StartOrder` for what waits, `divide_memory` for each engine, `best_drafts` for its drafts.
"""

from collections.abc import Sequence
from math import ceil
from typing import Final, Literal

from msgspec.structs import replace

from ebbtide.coordinator.state.run_state import RunState
from ebbtide.scheduling.long_tail.chunks.chunk_admission import divide_memory, is_due
from ebbtide.scheduling.long_tail.chunks.kv_contexts import ChunkRules, KvContext
from ebbtide.scheduling.long_tail.start_order import StartOrder, WaitingSample
from ebbtide.simulator.rivals.tail.balanced_moves import balanced_moves
from ebbtide.simulator.rivals.tail.divided_decider import DividedDecider
from ebbtide.simulator.rivals.tail.divided_policy import DividedPolicy
from ebbtide.simulator.rivals.tail.draft_rules import greedy_drafts
from ebbtide.simulator.rivals.tail.group_rests import LearntRests, NoRests, RestForecast, TrueRests
from ebbtide.simulator.rivals.tail.speculation_pace import SpeculationPace
from ebbtide.simulator.rivals.tail.step_members import EngineView, StepMember
from ebbtide.simulator.world.kv_pool import KvPool
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator

#: Tokens that a member may make in a second, with speculation: chunks are decided that far ahead.
_LEAD_TOKENS_PER_S: Final = 64
#: So many of those that wait are offered to an engine.
_OFFERED: Final = 64
#: Who gives up his memory loses nothing where a pool keeps it, so forecasts need not fit the memory.
_NO_BOUND: Final = 1e9
#: A step's samples all begin to wait at once and all must end, so none is served before others for its age.
_NO_AGE: Final = 1e12


class LongTailDecider(DividedDecider):
    """`rests`: what is known of lengths.

    Invariant: a member that runs has memory for its response up to `until`, as `divide_memory` gave it.
    """

    def __init__(
        self,
        coordinator: VirtualCoordinator,
        *,
        rests: RestForecast,
        round_s: float,
        pool: KvPool | None,
        pace: SpeculationPace | None,
    ) -> None:
        super().__init__(coordinator, round_s=round_s, pool=pool, pace=pace)
        self._rests, self._lead = rests, max(8, round(_LEAD_TOKENS_PER_S * 2 * round_s))
        self._counts: dict[str, int] = {}  # members of each engine after the last round
        self._left = 0  # that waited after the last round

    def divide(self, run: RunState, views: Sequence[EngineView], now: float) -> None:
        self._rests.look(self.members)
        waiting = self._in_order(now)
        if not self._left:  # nobody waited, so engines may have room for those who do now
            self._counts = {}
        if not waiting:
            self._balance(views, now)
        slots = self._even_slots(views, len(waiting))
        starts = list[tuple[StepMember, EngineView]]()
        for view in sorted(views, key=lambda view: len(view.members)):
            rules = self._rules(view, slots)
            if self._changes(view, rules, bool(waiting)):
                started = self._divide_one(view, rules, waiting[:_OFFERED], now)
                starts += ((one, view) for one in started)
                gone = {id(one) for one in started}
                waiting = [one for one in waiting if id(one) not in gone]
            self._counts[view.session.session_id] = len(view.members)
        self._left = len(waiting)
        self.start(run, starts, now)

    def _divide_one(
        self, view: EngineView, rules: ChunkRules, offered: Sequence[StepMember], now: float
    ) -> list[StepMember]:
        """Share out one engine's memory. Returns what starts there."""
        by_id = {one.rollout_id: one for one in (*view.members, *offered)}
        running = [self._context(one, one.since, one.prompt + one.until) for one in view.members]
        decision = divide_memory(running, [self._context(one, now, 0) for one in offered], rules, now)
        self.stop(view, [by_id[key] for key in decision.parked])
        for key, reserved in (*decision.grown, *decision.started):
            by_id[key].until = reserved - by_id[key].prompt
        started = [by_id[key] for key, _ in decision.started]
        view.members = [*(one for one in view.members if not one.leaving), *started]
        return started

    def _changes(self, view: EngineView, rules: ChunkRules, waits: bool) -> bool:
        """Whether there is anything to decide at an engine: something ended, begins to wait, or needs a chunk."""
        if waits and len(view.members) != self._counts.get(view.session.session_id, -1):
            return True
        return any(is_due(self._context(one, 0.0, one.prompt + one.until), rules) for one in view.members)

    def _context(self, one: StepMember, since: float, reserved: int) -> KvContext:
        return KvContext(
            key=one.rollout_id,
            prompt=one.prompt,
            tokens=one.context,
            most=one.cap - one.made,
            since_s=since,
            prefix=str(one.group),
            reserved=reserved,
            rest=self._rests.rest(one),
        )

    def _rules(self, view: EngineView, slots: int) -> ChunkRules:
        running = max(len(view.members), min(view.slots, slots))
        rules = ChunkRules(kv_tokens=view.kv_tokens - view.leaving, slots=running, lead=self._lead)
        return rules if self.pool is None else replace(rules, filled=_NO_BOUND)

    def _even_slots(self, views: Sequence[EngineView], waiting: int) -> int:
        """An even share of all that runs and waits, so that no engine takes the last ones alone."""
        return ceil((waiting + sum(len(view.members) for view in views)) / len(views))

    def _in_order(self, now: float) -> list[StepMember]:
        waiting = self.members.waiting
        by_id = {one.rollout_id: one for one in waiting}
        probed = {
            group: sum(one.ended or one.made > 0 or bool(one.engine) for one in some)
            for group, some in self.members.groups.items()
        }
        samples = [self._sample(one, bool(probed[one.group])) for one in waiting]
        return [by_id[one.sample] for one in StartOrder(samples, now, oldest_s=_NO_AGE)]

    def _sample(self, one: StepMember, probed: bool) -> WaitingSample:
        rest = self._rests.rest(one)
        return WaitingSample(
            sample=one.rollout_id,
            group=str(one.group),
            rest=rest,
            longest_rest=rest,
            kv_tokens=one.context,
            since_s=one.since,
            place=one.place,
            probed=probed,
        )

    def _balance(self, views: Sequence[EngineView], now: float) -> None:
        costs = self._coordinator.worker(views[0].session.session_id).terms.profile.costs
        for move in balanced_moves(views, costs, self._rests.rest, now):
            self.stop(move.source, [move.member], move.target)
            move.source.members.remove(move.member)


class LongTailPolicy(DividedPolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ebbtide's rules for the long tail, with a pool of keys and values and grouped speculation.

    It is told what workers report. With `knowledge` "true_lengths" it is told all lengths: the oracle to compare with.
    Speculation is a model (`speculation_pace`).
    """

    knowledge: Literal["learnt", "true_lengths", "none"] = "learnt"
    former: tuple[tuple[int, ...], ...] = ()  # lengths of the groups of the step before, by which forecasts begin

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        return LongTailDecider(
            coordinator,
            rests=self._rests(),
            round_s=self.round_s,
            pool=self.pool(),
            pace=self.pace(coordinator, greedy_drafts),
        )

    def _rests(self) -> RestForecast:
        match self.knowledge:
            case "true_lengths":
                return TrueRests()
            case "none":
                return NoRests()
            case "learnt":
                return LearntRests(self.former)
