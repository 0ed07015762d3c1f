"""Forecasts what a run's rollouts have still to come, from all that the coordinator hears of them anyway.

A group is known by its finished responses, by what its open samples have stored, and by its prompt's former epochs. A
finished response has its group's forecast made anew in one of the next calls of `renew`, and so does a sample that has
made much more than its forecast knew of. Nothing is done for single tokens, and nothing is forecast in other calls but
for groups of which no sample has begun, whose forecasts are common ones. `LengthLearner` learns from ended groups, as
many together as a step has, or once none is open.

Invariant: `_groups` has each group with an open sample, or one that ended and has not taught yet; `waiting` and
`running` of a group are disjoint. Lost with the process, and built anew from the queue and the attempts that are read
back: only what finished in groups that are still open is forgotten, and what earlier groups taught. Forecasts are no
truth: nothing that is stored depends on them.
"""

from collections.abc import Iterable, Iterator
from itertools import islice, zip_longest
from typing import Final, NamedTuple, Protocol

from msgspec import Struct

from ebbtide.coordinator.forecasts.length_learner import (
    EndedGroup,
    LengthLearner,
    LengthQuantiles,
    UnfinishedGroup,
    surely,
)

#: Least time between two renewals, and what one of them makes, in forecasts of small groups: some 3 milliseconds of a
#: core. They are counted and not timed, so that the same is decided again in a replay.
_RENEW_EVERY_S: Final = 0.05
_AT_ONCE: Final = 12
#: So many samples that have made different lengths cost as much as a forecast.
_PER_FORECAST: Final = 16
#: Groups that one renewal looks at for such as have made much more.
_WATCHED_AT_ONCE: Final = 64
#: A forecast is made anew once some sample has made so much more than it knew of, and at least so many tokens.
_GROWN, _LEAST_GROWN = 1.15, 64
#: Ended groups teach at the latest when there are so many; if nothing is taught then, half of them go.
_MOST_UNTAUGHT: Final = 8_192
#: Until whole groups have taught, the open ones do, each time that so many times as many responses have ended.
_FIRST_LESSON, _MORE = 8, 1.5
#: Open groups of which the first lessons are taken.
_LESSON_GROUPS: Final = 512
#: Intervals whose coverage is counted at a time.
_COUNTED: Final = 1 << 17


class OpenSample(Protocol):
    """A rollout that waits or runs."""

    @property
    def made(self) -> int:
        """Tokens of its response that are stored."""
        ...


class _Known(NamedTuple):
    """What is expected of a sample, and the tokens that it had made then."""

    made: int
    quantiles: LengthQuantiles


class KnownGroup(Struct, eq=False, kw_only=True):
    """What is known of a group while some of its samples are open. Lengths in tokens. `waiting`, `running`: its open
    samples, by rollout.
    """

    place: int
    prompt: str = ""  # a digest, equal in each epoch; "": not known
    cap: int  # the longest response
    waiting: dict[str, OpenSample] = {}
    running: dict[str, OpenSample] = {}
    finished: list[int] = []  # whole responses, in the order in which they ended
    stopped: list[int] = []  # made by those that came to their cap, or were cancelled
    probe: str = ""  # the sample that goes first, while none has begun
    begun: bool = False
    outdated: bool = False  # more is known than its forecast knew of
    unstarted: LengthQuantiles | None = None  # of a sample that has made nothing; None: its forecast is to be made
    quantiles: dict[str, _Known] = {}  # of its samples that had begun

    @property
    def untouched(self) -> bool:
        """Whether nothing is known of it but its prompt."""
        return not (self.begun or self.finished or self.stopped)

    @property
    def open(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def due(self) -> bool:
        """Whether its forecast is to be made anew: its samples have made much more than that knew of, for example."""
        if self.outdated or (self.unstarted is None and self.begun and self.open):
            return True
        made = max((one.made for one in self.running.values()), default=0)
        knew = max((self.quantiles[name].made for name in self.running if name in self.quantiles), default=0)
        return surely(made) > max(_GROWN * knew, knew + _LEAST_GROWN)

    def knows(self) -> UnfinishedGroup:
        """What a forecast may know of it."""
        made = [one.made for some in (self.running, self.waiting) for one in some.values()]
        return UnfinishedGroup(
            finished=self.finished, stopped=self.stopped, made=made, prompt=self.prompt, cap=self.cap
        )

    def told(self) -> EndedGroup:
        """What it teaches once no sample is open."""
        return EndedGroup(lengths=self.finished, stopped=self.stopped, prompt=self.prompt)


class CoverageCount(NamedTuple):
    covered: int  # responses within their interval
    ended: int  # responses that had one


class ForecastCoverage:
    """Counts how often forecast intervals cover the lengths that come, so that an operator sees whether they hold. Each
    rollout counts by what was expected when it first got a worker. Four of five should lie within.
    """

    def __init__(self) -> None:
        self._asked: dict[str, LengthQuantiles] = {}  # of rollouts that are not over
        self.count = self._taken = CoverageCount(0, 0)

    def foresaw(self, rollout_id: str, quantiles: LengthQuantiles) -> None:
        """Note what is expected of a response of which nothing is made. The first word counts."""
        if len(self._asked) < _COUNTED:
            self._asked.setdefault(rollout_id, quantiles)

    def ended(self, rollout_id: str, tokens: int) -> None:
        """Note a response that ended, by itself or at its cap."""
        if (asked := self._asked.pop(rollout_id, None)) is not None:
            # A response at its cap would have gone on: the interval's end at the cap stands for all beyond.
            covered = asked.tenth <= tokens <= asked.ninth
            self.count = CoverageCount(self.count.covered + covered, self.count.ended + 1)

    def take(self) -> CoverageCount:
        """What was counted since the last call."""
        before, self._taken = self._taken, self.count
        return CoverageCount(self.count.covered - before.covered, self.count.ended - before.ended)

    def forget(self, rollout_id: str) -> None:
        """Note that a rollout is over without a whole response."""
        self._asked.pop(rollout_id, None)


class RunForecasts:
    """`batch`: groups of a step; `learner`: one that has learnt, if there is one."""

    def __init__(self, batch: int, learner: LengthLearner | None = None) -> None:
        self.learner: Final = learner or LengthLearner()
        self.coverage: Final = ForecastCoverage()
        self.known = self.learner.known  # responses of the run have taught something
        self._groups: dict[int, KnownGroup] = {}
        self._untaught: dict[int, KnownGroup] = {}  # of `_groups`: no sample is open
        self._batch = min(batch, _MOST_UNTAUGHT)
        self._changed: dict[int, None] = {}  # groups whose forecast is to be made anew, in this order
        self._watched: Iterator[int] = iter(())
        self._renewed = -1.0
        self._idle = False  # nobody reads forecasts now: none is made
        self._ended, self._next_lesson = 0, float(_FIRST_LESSON)
        self._untouched: dict[tuple[float, ...], LengthQuantiles] = {}  # of untouched groups, by kind

    # What is heard of rollouts.

    def wait(self, rollout_id: str, place: int, sample: OpenSample, *, cap: int, prompt: str = "") -> KnownGroup:
        """Note a rollout that is queued. `place`: its group's; `cap`: tokens of its longest response."""
        group = self._opened(place, cap, prompt)
        group.running.pop(rollout_id, None)
        group.waiting[rollout_id] = sample
        if sample.made:
            group.begun = True  # in the process before this one, if this one does not know it
            self._change(group)
        return group

    def run(self, rollout_id: str, place: int, sample: OpenSample, *, cap: int) -> KnownGroup:
        """Note a rollout that a worker got."""
        group = self._opened(place, cap, "")
        if not self._idle and group.untouched:
            group.unstarted = self.unstarted(group)
        group.waiting.pop(rollout_id, None)
        group.running[rollout_id] = sample
        group.begun = True
        if sample.made and rollout_id not in group.quantiles:
            self._change(group)
        if not (self._idle or sample.made) and self.learner.known and group.unstarted is not None:
            self.coverage.foresaw(rollout_id, group.unstarted)
        return group

    def finish(self, rollout_id: str, place: int, tokens: int, *, whole: bool) -> None:
        """Note a response that ended. `whole`: by itself, and not at its cap."""
        self.coverage.ended(rollout_id, tokens)
        if (group := self._groups.get(place)) is not None:
            (group.finished if whole else group.stopped).append(tokens)
            self._ended += 1
            self._close(group, rollout_id)

    def cancel(self, rollout_id: str, place: int) -> None:
        """Note that a rollout is over without a whole response: what it made is a bound of its length."""
        self.coverage.forget(rollout_id)
        if (group := self._groups.get(place)) is not None:
            sample = group.running.get(rollout_id) or group.waiting.get(rollout_id)
            if sample is not None and sample.made:
                group.stopped.append(sample.made)
            self._close(group, rollout_id)

    def forget_open(self) -> None:
        """Forget which samples are open: the caller names them anew, then calls `settle_all`."""
        for group in self._groups.values():
            group.waiting, group.running, group.probe = {}, {}, ""

    def settle_all(self) -> None:
        """Note that all open samples were named."""
        for group in [one for one in self._groups.values() if not one.open and one.place not in self._untaught]:
            self._settle(group)

    # What is to be expected.

    def group(self, place: int) -> KnownGroup | None:
        return self._groups.get(place)

    @property
    def groups(self) -> Iterable[KnownGroup]:
        """Those with open samples, and those that have not taught yet."""
        return self._groups.values()

    def quantiles(self, group: KnownGroup, rollout_id: str) -> LengthQuantiles | None:
        """Tokens that an open sample has still to come, by what was known when its group's forecast was made. None if
        that is still to be made.
        """
        if group.unstarted is None:
            return None
        knew, found = group.quantiles.get(rollout_id, _Known(0, group.unstarted))
        sample = group.running.get(rollout_id) or group.waiting.get(rollout_id)
        grown = sample.made - knew if sample is not None else 0
        return LengthQuantiles(*(max(1.0, one - grown) for one in found)) if grown > 0 else found

    def unstarted(self, group: KnownGroup) -> LengthQuantiles:
        """The same, of a sample that has made nothing: by its prompt alone while the group's forecast is to be made."""
        if group.unstarted is not None:
            return group.unstarted
        kind = float(group.cap), *self.learner.kind(group.prompt)
        if (found := self._untouched.get(kind)) is None:
            untouched = UnfinishedGroup(prompt=group.prompt, cap=group.cap)
            found = self._untouched[kind] = self.learner.forecast(untouched).quantiles(0)
        return found

    def renew(self, now: float, *, read: bool = True) -> list[KnownGroup]:
        """Teach what has ended, and make some forecasts anew. Returns the groups whose forecasts are new. `read`:
        somebody reads them; else none is made.
        """
        self._idle = not read
        self._teach()
        if self._idle or now - self._renewed < _RENEW_EVERY_S:
            return []
        self._renewed, room, renewed = now, float(_AT_ONCE), list[KnownGroup]()
        # Either kind in turn: one of which something was heard, and one that has made much.
        for group in (one for pair in zip_longest(self._heard(), self._grown()) for one in pair if one is not None):
            if room <= 0.0:
                break
            room -= 1.0 + self._foresee(group) / _PER_FORECAST
            renewed.append(group)
        return renewed

    def _heard(self) -> Iterator[KnownGroup]:
        while self._changed:
            yield self._groups[next(iter(self._changed))]

    def _grown(self) -> Iterator[KnownGroup]:
        for _ in range(min(_WATCHED_AT_ONCE, len(self._groups) + 1)):
            place = next(self._watched, -1)
            if place < 0:
                self._watched = iter(list(self._groups))
            elif place not in self._changed and (group := self._groups.get(place)) is not None and group.due:
                yield group

    def _foresee(self, group: KnownGroup) -> int:
        """Make a group's forecast anew. Returns how many lengths its samples have made."""
        self._changed.pop(group.place, None)
        group.outdated, group.unstarted, group.quantiles = False, None, {}
        if group.untouched:
            group.unstarted = self.unstarted(group)
            return 1
        begun = {name: made for name, one in (*group.running.items(), *group.waiting.items()) if (made := one.made)}
        levels = sorted({0, *map(surely, begun.values())})
        found = dict(zip(levels, self.learner.forecast(group.knows()).quantiles_of(levels), strict=True))
        group.unstarted = found[0]
        group.quantiles = {name: _Known(level := surely(made), found[level]) for name, made in begun.items()}
        return len(levels)

    # What ended groups teach.

    def _teach(self) -> None:
        if self._untaught and (len(self._untaught) >= self._batch or len(self._untaught) == len(self._groups)):
            for place in self._untaught:
                del self._groups[place]
            taught, self._untaught = list(self._untaught.values()), {}
            self.learner.groups_ended([one.told() for one in taught if one.finished or one.stopped])
        elif not self.learner.known and self._ended >= self._next_lesson:
            self._next_lesson = _MORE * self._ended
            some = islice((one for one in self._groups.values() if not one.untouched), _LESSON_GROUPS)
            self.learner.groups_open([one.knows() for one in some])
            self.known = True
        else:
            return
        self.known = self.known or self.learner.known
        self._untouched.clear()
        for group in self._groups.values():
            group.outdated = True

    def _opened(self, place: int, cap: int, prompt: str) -> KnownGroup:
        group = self._groups.get(place)
        if group is None:
            group = self._groups[place] = KnownGroup(place=place, cap=cap, prompt=prompt)
        if self._untaught.pop(place, None) is not None:
            self._change(group)
        group.prompt = group.prompt or prompt
        return group

    def _close(self, group: KnownGroup, rollout_id: str) -> None:
        group.waiting.pop(rollout_id, None)
        group.running.pop(rollout_id, None)
        self._settle(group)

    def _settle(self, group: KnownGroup) -> None:
        if group.open:
            self._change(group)
            return
        self._untaught[group.place] = group
        self._changed.pop(group.place, None)
        group.unstarted, group.quantiles = None, {}  # thousands may wait until they teach
        if len(self._untaught) > _MOST_UNTAUGHT:  # nothing is taught while forecasts give way
            for place in list(self._untaught)[::2]:  # of any age: of a step the long ones end last
                del self._untaught[place], self._groups[place]

    def _change(self, group: KnownGroup) -> None:
        group.outdated = True
        self._changed[group.place] = None
