"""Decides which runs share which trainer devices and rollout nodes: who joins whom, who moves, who is refused.

A group has a trainer unit, on which all of its runs train in turns, and units of rollout nodes, on one of which each
run is seated: there, and at the trainer, its state stays in host memory between its turns, so memory bounds how many
meet. A group costs what its nodes cost, however they are used. Where a run sits best is decided by the cost added per
unit of work: the price of the nodes that it adds, less the price of the work that the group gets done more with it. So
joining a group whose devices idle beats a new group, and joining a full one is worth nothing.

The bound of each run, on the time of its rounds by the time that they would take alone, is kept by probability: a seat
is allowed where the forecast of `phase_turns.play`, over learnt distributions of phase times, leaves every member
within its bound with probability `Terms.confidence`. Planning with the longest response of each run, as RollMux does
(arXiv 2512.11306, Algorithm 1), does not protect a ratio: the time alone shrinks too.

Groups change on an arrival (`GroupPlanner.seat`), a departure or failure (`without`, then `seat` for those who lost
their place), and on reviews (`GroupPlanner.review`), of which one is due when a run left, when forecasts drifted, and
now and then. A review moves runs one by one, each at the end of a round, where that pays for their switches. The
simulator (`lab/ebbtide/simulator/shared_devices.py`) calls all of these as the coordinator's keeper of groups is to
call them: records in, decisions with their reasons out.

Invariant: a `GroupPlanner` keeps forecasts of groups only to save time. Lost with the process, they are made anew.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import count
from math import inf, sqrt
from statistics import NormalDist
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ebbtide.coordinator.rules.phase_turns import NO_MERGING, PhaseForecast, TailMerging, TurnMember, play

#: Seats that are tried by `play`, of the most promising ones.
_PLAYED: Final = 8
#: Groups that a review compares one with.
_COMPARED: Final = 4
#: Forecasts of groups that are remembered.
_REMEMBERED: Final = 20_000


class SharingRun(Struct, frozen=True, kw_only=True):
    """A run that takes turns, as it is known now."""

    run_id: str
    rollout: PhaseForecast  # of one round, alone on `width` rollout nodes
    train: PhaseForecast  # alone on `width` trainer nodes
    width: int = 1  # nodes of each kind
    rollout_bytes: int = 0  # of host memory on each rollout node, while it does not compute
    train_bytes: int = 0  # on each trainer node
    max_slowdown: float = inf
    shares: bool = True  # False: it wants devices of its own
    priority: int = 0  # higher ones have their turns first
    alone_s: float = 0.0  # that its rounds so far would have taken alone
    took_s: float = 0.0  # that they took, moves included
    rollout_switch_s: float = 0.0  # to bring the resident state back
    train_switch_s: float = 0.0
    cold_s: float = 0.0  # to start elsewhere, where nothing of it is resident

    @property
    def round_s(self) -> float:
        return self.rollout.mean + self.train.mean


class _Facts(NamedTuple):
    """What follows from what is known of a run."""

    run: SharingRun
    member: TurnMember  # on unit 0
    key: int  # equal as long as plans are
    train: float  # share of the time in which it has the trainer, alone
    rollout: float  # in which it keeps its unit from others
    work: float  # the price of its work an hour, alone


class Seat(Struct, frozen=True):
    run_id: str
    unit: int  # of its group's units of rollout nodes


class RunGroup(Struct, frozen=True):
    name: str
    width: int  # nodes of the trainer unit, and of each unit of rollout nodes
    units: tuple[int, ...]  # names of the units of rollout nodes
    seats: tuple[Seat, ...]


class Terms(Struct, frozen=True, kw_only=True):
    """What the plan is made for."""

    rollout_price: float  # of a node and hour
    train_price: float
    rollout_memory: int  # bytes of host memory of a rollout node, for resident states
    train_memory: int
    merging: TailMerging = NO_MERGING
    confidence: float = 0.99
    #: What a group costs for each unit of the price of the work that it gets done: what work is worth.
    worth: float = 1.5
    #: For so long a better place counts. A longer horizon moves more runs.
    horizon_s: float = 7_200.0


class Free(NamedTuple):
    """Nodes that no group has."""

    rollout_nodes: float = inf
    train_nodes: float = inf


UNLIMITED: Final = Free()


class Reason(StrEnum):
    """Why a run sits where it sits, moves, or waits."""

    ALONE = "alone"  # it shares with nobody
    FILLS_IDLE = "fills_idle"  # the place that gets most work done for what it adds
    CHEAPER = "cheaper"  # a move saves more than it costs
    BOUND_AT_RISK = "bound_at_risk"  # a member's bound would not be kept otherwise
    NO_NODES = "no_nodes"  # `needed` nodes of a kind, of which there are `there`
    MEMORY = "memory"  # bytes of host memory
    BOUND = "bound"  # the run's own slowdown would be `needed`, its bound is `there`
    OTHERS_BOUND = "others_bound"  # the same of the member who is named


class Wish(StrEnum):
    """What a run wants that cannot be seated now."""

    QUEUE = "queue"
    REFUSE = "refuse"


class Seated(Struct, frozen=True, kw_only=True):
    group: RunGroup  # as it is with the run
    seat: Seat
    reason: Reason
    added_price: float  # of nodes, an hour
    added_work: float  # the price of work that is done more, an hour
    slowdown: float  # that is forecast for the run


class NotSeated(Struct, frozen=True, kw_only=True):
    """`queued`: it waits, as it wished; else it is refused. Numbers: see `Reason`."""

    queued: bool
    reason: Reason
    needed: float
    there: float
    run_id: str = ""  # whose bound it is


class Move(Struct, frozen=True, kw_only=True):
    """A run goes elsewhere at the end of its round."""

    seated: Seated
    source: str  # the name of the group that it leaves
    reason: Reason
    saved_price: float  # an hour, of all moves that were decided together
    switch_price: float  # that they cost once


class Forecast(NamedTuple):
    """Of a group: each member's slowdown and its standard deviation, and the price of the group's work an hour."""

    slowdowns: tuple[float, ...]
    deviations: tuple[float, ...]
    work: float


class Candidate(NamedTuple):
    group: RunGroup  # as it would be
    seat: Seat
    added_price: float
    guess: float  # of its score, the least is best


def group_price(group: RunGroup, terms: Terms) -> float:
    """An hour, of all nodes of a group."""
    return group.width * (terms.train_price + len(group.units) * terms.rollout_price)


def without(group: RunGroup, run_id: str) -> RunGroup | None:
    """A group after a run left, without units that nobody needs; None if nobody is left."""
    seats = tuple(seat for seat in group.seats if seat.run_id != run_id)
    used = {seat.unit for seat in seats}
    return replace(group, seats=seats, units=tuple(unit for unit in group.units if unit in used)) if seats else None


def resident_bytes(group: RunGroup, runs: Mapping[str, SharingRun]) -> tuple[int, int]:
    """Host memory that resident states need: on the fullest rollout node, and on each trainer node."""
    by_unit = dict.fromkeys(group.units, 0)
    for seat in group.seats:
        by_unit[seat.unit] += runs[seat.run_id].rollout_bytes
    return max(by_unit.values(), default=0), sum(runs[seat.run_id].train_bytes for seat in group.seats)


class GroupPlanner:
    """Plans groups under `terms`. Names of new groups come from the caller, and are not used again."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self._normal = NormalDist().inv_cdf(terms.confidence)
        self._keys = count()
        self._facts: dict[str, _Facts] = {}
        self._forecasts: dict[tuple[tuple[int, int], ...], Forecast] = {}

    # What is known of a group.

    def forecast(self, group: RunGroup, runs: Mapping[str, SharingRun]) -> Forecast:
        """What turns cost each member, in the order of its seats."""
        facts = [self._known(runs[seat.run_id]) for seat in group.seats]
        key = tuple((one.key, seat.unit) for one, seat in zip(facts, group.seats, strict=True))
        found = self._forecasts.get(key)
        if found is None:
            if len(self._forecasts) >= _REMEMBERED:
                self._forecasts.clear()
            found = self._forecasts[key] = self._forecast(group, facts)
        return found

    def _forecast(self, group: RunGroup, facts: Sequence[_Facts]) -> Forecast:
        members = [replace(one.member, unit=seat.unit) for one, seat in zip(facts, group.seats, strict=True)]
        played = play(members, self.terms.merging)
        work = sum(one.work / now.slowdown for one, now in zip(facts, played, strict=True))
        errors = sum(one.run.rollout.error**2 + one.run.train.error**2 for one in facts)
        error = sqrt(errors / (2 * len(facts)))
        deviations = tuple(
            sqrt(now.deviation**2 / _ROUNDS_OF_A_BOUND + ((now.slowdown - 1.0) * error) ** 2 + _PLAY_ERROR**2)
            for now in played
        )
        return Forecast(tuple(now.slowdown for now in played), deviations, work)

    def _known(self, run: SharingRun) -> _Facts:
        found = self._facts.get(run.run_id)
        if found is None or found.run is not run:
            same = found is not None and _plans_alike(found.run, run)
            found = self._facts[run.run_id] = self._made(run, found.key if found and same else next(self._keys))
        return found

    def _made(self, run: SharingRun, key: int) -> _Facts:
        terms, round_s = self.terms, run.round_s
        train, rollout = run.train.mean / round_s, run.rollout.mean * terms.merging.occupied / round_s
        member = TurnMember(
            rollout=run.rollout.seconds,
            train=run.train.seconds,
            unit=0,
            max_slowdown=run.max_slowdown,
            rollout_switch_s=run.rollout_switch_s,
            train_switch_s=run.train_switch_s,
            priority=run.priority,
        )
        work = run.width * (rollout * terms.rollout_price + train * terms.train_price)
        return _Facts(run, member, key, train, rollout, work)

    def forget(self, run_id: str) -> None:
        """A run has left."""
        self._facts.pop(run_id, None)

    def at_risk(self, group: RunGroup, runs: Mapping[str, SharingRun]) -> tuple[Seat, float] | None:
        """The member whose bound is furthest from being kept, and by which share; None if all bounds are kept."""
        found = self.forecast(group, runs)
        excess = [
            (slowdown + self._normal * deviation) / self._bound(runs[seat.run_id]) if slowdown < inf else inf
            for seat, slowdown, deviation in zip(group.seats, found.slowdowns, found.deviations, strict=True)
        ]
        at = max(range(len(excess)), key=excess.__getitem__)
        return (group.seats[at], excess[at]) if len(excess) > 1 and excess[at] > 1.0 + _ROUNDING else None

    def _bound(self, run: SharingRun) -> float:
        """That its rounds must keep from now on. What it is ahead or behind counts over as many rounds as it had, and
        at least over some.
        """
        aim = 1.0 + _AIM * (run.max_slowdown - 1.0)
        ahead = aim * run.alone_s - run.took_s if run.alone_s else 0.0
        return max(_LEAST_BOUND, aim + ahead / max(run.alone_s, _SOON_ROUNDS * run.round_s))

    # Who sits where.

    def seat(
        self,
        run: SharingRun,
        groups: Iterable[RunGroup],
        runs: Mapping[str, SharingRun],
        *,
        new_name: str,
        free: Free = UNLIMITED,
        wish: Wish = Wish.QUEUE,
    ) -> Seated | NotSeated:
        """Find the place of a run. `runs`: all members of `groups`; `new_name`: of a group, should it get one."""
        known = {**runs, run.run_id: run}
        refused = _Refused()
        candidates = self._candidates(run, groups, known, free, refused) if run.shares else []
        best: Seated | None = None
        best_score = inf
        new = self._new_group(run, new_name, free, refused)
        if new is not None:
            best, best_score = new, self._score(new)
        for one in sorted(candidates, key=lambda one: one.guess)[:_PLAYED]:
            if one.guess >= best_score:
                break
            found = self._tried(one, known, refused)
            if found is not None and self._score(found) < best_score:
                best, best_score = found, self._score(found)
        if best is not None:
            return best
        reason, needed, there, name = refused.told()
        return NotSeated(queued=wish == Wish.QUEUE, reason=reason, needed=needed, there=there, run_id=name)

    def _score(self, seated: Seated) -> float:
        return seated.added_price - self.terms.worth * seated.added_work

    def _new_group(self, run: SharingRun, name: str, free: Free, refused: "_Refused") -> Seated | None:
        terms = self.terms
        for needed, there, reason in (
            (run.width, free.train_nodes, Reason.NO_NODES),
            (run.width, free.rollout_nodes, Reason.NO_NODES),
            (run.rollout_bytes, terms.rollout_memory, Reason.MEMORY),
            (run.train_bytes, terms.train_memory, Reason.MEMORY),
        ):
            if needed > there:
                refused.note(reason, needed, there)
                return None
        group = RunGroup(name, run.width, (0,), (Seat(run.run_id, 0),))
        return Seated(
            group=group,
            seat=group.seats[0],
            reason=Reason.ALONE,
            added_price=group_price(group, terms),
            added_work=self._known(run).work,
            slowdown=1.0,
        )

    def _candidates(
        self,
        run: SharingRun,
        groups: Iterable[RunGroup],
        runs: Mapping[str, SharingRun],
        free: Free,
        refused: "_Refused",
    ) -> list[Candidate]:
        found = []
        for group in groups:
            if group.width != run.width or not all(runs[seat.run_id].shares for seat in group.seats):
                continue
            trained = sum(runs[seat.run_id].train_bytes for seat in group.seats) + run.train_bytes
            if trained > self.terms.train_memory:
                refused.note(Reason.MEMORY, trained, self.terms.train_memory)
                continue
            new_unit = 1 + max(group.units)
            for unit in (*group.units, new_unit):
                if unit == new_unit and run.width > free.rollout_nodes:
                    continue
                one = self._candidate(run, group, unit, runs, refused)
                if one is not None:
                    found.append(one)
        return found

    def _candidate(
        self, run: SharingRun, group: RunGroup, unit: int, runs: Mapping[str, SharingRun], refused: "_Refused"
    ) -> Candidate | None:
        """A seat for which there is memory, and where bounds could be kept if devices never idled."""
        beside = sum(runs[seat.run_id].rollout_bytes for seat in group.seats if seat.unit == unit)
        if (resident := beside + run.rollout_bytes) > self.terms.rollout_memory:
            refused.note(Reason.MEMORY, resident, self.terms.rollout_memory)
            return None
        mine = self._known(run)
        load = mine.train / run.max_slowdown
        kept = mine.rollout / run.max_slowdown
        for seat in group.seats:
            one = self._known(runs[seat.run_id])
            load += one.train / one.run.max_slowdown
            kept += one.rollout / one.run.max_slowdown if seat.unit == unit else 0.0
        load = max(load, kept)
        if load > 1.0 + _ROUNDING:
            refused.note(Reason.BOUND, load * run.max_slowdown, run.max_slowdown, run.run_id)
            return None
        units = group.units if unit in group.units else (*group.units, unit)
        seat = Seat(run.run_id, unit)
        after = replace(group, units=units, seats=(*group.seats, seat))
        added = group_price(after, self.terms) - group_price(group, self.terms)
        more = self._most_work(after, runs) - self.forecast(group, runs).work
        return Candidate(after, seat, added, added - self.terms.worth * more)

    def _most_work(self, group: RunGroup, runs: Mapping[str, SharingRun]) -> float:
        """The price of work an hour, if all members were slowed down alike and no device idled before that."""
        train = work = 0.0
        units = dict.fromkeys(group.units, 0.0)
        for seat in group.seats:
            one = self._known(runs[seat.run_id])
            train += one.train
            units[seat.unit] += one.rollout
            work += one.work
        return work / max(1.0, train, *units.values())

    def _tried(self, one: Candidate, runs: Mapping[str, SharingRun], refused: "_Refused") -> Seated | None:
        """The candidate, if it keeps all bounds by forecast."""
        found = self.forecast(one.group, runs)
        if (broken := self.at_risk(one.group, runs)) is not None:
            seat, excess = broken
            own = seat.run_id == one.seat.run_id
            bound = runs[seat.run_id].max_slowdown
            refused.note(Reason.BOUND if own else Reason.OTHERS_BOUND, excess * bound, bound, seat.run_id)
            return None
        before = without(one.group, one.seat.run_id)
        work = found.work - (self.forecast(before, runs).work if before is not None else 0.0)
        return Seated(
            group=one.group,
            seat=one.seat,
            reason=Reason.FILLS_IDLE,
            added_price=one.added_price,
            added_work=work,
            slowdown=found.slowdowns[-1],
        )

    # Who moves.

    def review(
        self,
        group: RunGroup,
        groups: Iterable[RunGroup],
        runs: Mapping[str, SharingRun],
        *,
        new_name: str,
        free: Free = UNLIMITED,
    ) -> list[Move]:
        """The moves, in the order in which they are to be made, that keep bounds of this group which are at risk, or
        that save what they cost within the horizon: of one member, or of all of them. Empty if it stays as it is.
        `groups`: all, with this one. The next move may be made before the one before it has ended.
        """
        others = [one for one in groups if one.name != group.name]
        if self.at_risk(group, runs) is not None:
            return self._relieved(group, others, runs, new_name, free)
        best: list[Move] = []
        for members in ([seat] for seat in group.seats if len(group.seats) > 1):
            found = self._moved(group, members, others, runs, free)
            if found and (not best or found[0].saved_price > best[0].saved_price):
                best = found
        whole = self._moved(group, group.seats, others, runs, free)
        return whole if whole and (not best or whole[0].saved_price > best[0].saved_price) else best

    def _relieved(
        self, group: RunGroup, others: Sequence[RunGroup], runs: Mapping[str, SharingRun], new_name: str, free: Free
    ) -> list[Move]:
        """The one move after which all bounds are kept, for the least price. Where one is not enough, the next review
        finds another.
        """
        best: Move | None = None
        best_score = True, inf
        for seat in group.seats:
            rest = without(group, seat.run_id)
            if rest is None:
                continue
            run = _started_anew(runs[seat.run_id])
            found = self.seat(run, others, _less(runs, seat.run_id), new_name=new_name, free=free)
            if isinstance(found, NotSeated):
                continue
            saved = group_price(group, self.terms) - group_price(rest, self.terms)
            lost = self.forecast(group, runs).work - self.forecast(rest, runs).work
            score = self.at_risk(rest, runs) is not None, self._score(found) - saved + self.terms.worth * lost
            if score < best_score:
                best_score = score
                best = Move(
                    seated=found,
                    source=group.name,
                    reason=Reason.BOUND_AT_RISK,
                    saved_price=saved - found.added_price,
                    switch_price=self._switch_price(run),
                )
        return [best] if best is not None else []

    def _moved(
        self,
        group: RunGroup,
        members: Sequence[Seat],
        others: Sequence[RunGroup],
        runs: Mapping[str, SharingRun],
        free: Free,
    ) -> list[Move]:
        """The moves of some members to other groups that are there, if they pay together."""
        rest: RunGroup | None = group
        gained = 0.0
        switches = 0.0
        places = {one.name: one for one in others}
        found: list[Seated] = []
        for seat in sorted(members, key=lambda one: -runs[one.run_id].round_s):
            run = _started_anew(runs[seat.run_id])
            seated = self._elsewhere(run, list(places.values()), _less(runs, seat.run_id), free)
            if seated is None or rest is None:
                return []
            more = len(seated.group.units) - len(places[seated.group.name].units)
            free = Free(free.rollout_nodes - more * run.width, free.train_nodes)
            places[seated.group.name] = seated.group
            gained -= self._score(seated)
            switches += self._switch_price(run)
            rest = without(rest, seat.run_id)
            found.append(seated)
        gained += group_price(group, self.terms) - self.terms.worth * self.forecast(group, runs).work
        if rest is not None:
            gained -= group_price(rest, self.terms) - self.terms.worth * self.forecast(rest, runs).work
        if gained * self.terms.horizon_s / 3600.0 <= switches:
            return []
        return [
            Move(seated=one, source=group.name, reason=Reason.CHEAPER, saved_price=gained, switch_price=switches)
            for one in found
        ]

    def _elsewhere(
        self, run: SharingRun, groups: Sequence[RunGroup], runs: Mapping[str, SharingRun], free: Free
    ) -> Seated | None:
        known = {**runs, run.run_id: run}
        refused = _Refused()
        candidates = self._candidates(run, groups, known, free, refused) if run.shares else []
        for one in sorted(candidates, key=lambda one: one.guess)[:_COMPARED]:
            if (found := self._tried(one, known, refused)) is not None:
                return found
        return None

    def _switch_price(self, run: SharingRun) -> float:
        """What it costs that a run starts cold in another place: its own nodes' time, twice, since those of both places
        wait for it.
        """
        return 2.0 * run.cold_s * run.width * (self.terms.rollout_price + self.terms.train_price) / 3600.0


class _Refused:
    """Why seats were not allowed: the reason that came nearest to one."""

    def __init__(self) -> None:
        self._nearest: tuple[float, Reason, float, float, str] | None = None

    def note(self, reason: Reason, needed: float, there: float, run_id: str = "") -> None:
        ratio = needed / there if there > 0 else inf
        if self._nearest is None or ratio < self._nearest[0]:
            self._nearest = ratio, reason, needed, there, run_id

    def told(self) -> tuple[Reason, float, float, str]:
        return self._nearest[1:] if self._nearest is not None else (Reason.NO_NODES, 1.0, 0.0, "")


#: Bounds are compared up to this share: forecasts are floats.
_ROUNDING: Final = 1e-6
#: What forecasts are wrong by, as a standard deviation, even of times that are known well: they play few rounds.
_PLAY_ERROR: Final = 0.002
_LEAST_S: Final = 1e-3
#: Less than any slowdown: a run that is so far behind must be alone.
_LEAST_BOUND: Final = 0.5
#: The share of what a bound allows that plans use: a run may end before it caught up.
_AIM: Final = 0.97
#: A run that is behind its bound is to catch up within so many rounds, if it had fewer before.
_SOON_ROUNDS: Final = 20.0
#: A bound is on the mean of a run's rounds, of which there are at least so many.
_ROUNDS_OF_A_BOUND: Final = 250.0


def _less(runs: Mapping[str, SharingRun], run_id: str) -> Mapping[str, SharingRun]:
    return {name: run for name, run in runs.items() if name != run_id}


def _started_anew(run: SharingRun) -> SharingRun:
    """As the run is after a cold start, which counts for its bound."""
    return replace(run, took_s=run.took_s + run.cold_s, alone_s=max(run.alone_s, _LEAST_S))


def _plans_alike(one: SharingRun, other: SharingRun) -> bool:
    return (
        one.rollout is other.rollout
        and one.train is other.train
        and (one.max_slowdown, one.rollout_switch_s, one.train_switch_s, one.width, one.priority)
        == (other.max_slowdown, other.rollout_switch_s, other.train_switch_s, other.width, other.priority)
    )
