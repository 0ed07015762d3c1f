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

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeAlias

from ebbtide.scheduling.long_tail.length_forecast import LengthForecast, LengthOutlook
from ebbtide.scheduling.long_tail.length_learner import LengthLearner, LengthLesson, UnfinishedGroup
from ebbtide.scheduling.long_tail.outlook.forecast_coverage import ForecastCoverage
from ebbtide.scheduling.long_tail.outlook.known_group import KnownGroup, OpenSample

#: Least time between two renewals, and forecasts and outlooks that one of them makes: some 3 milliseconds of a core.
#: They are counted and not timed, so that the same is decided again in a replay.
_RENEW_EVERY_S: Final = 0.05
_AT_ONCE: Final = 24
#: Groups that one renewal looks at for such as have made much more.
_WATCHED_AT_ONCE: Final = 64
#: Ended groups teach at the latest when there are so many, and no more are kept: with a kilobyte each, 8 MB.
_MOST_UNTAUGHT: Final = 8_192
#: The golden ratio: its multiples fill the unit interval evenly.
_STEP: Final = 0.6180339887
#: Until whole groups have taught, the open ones do, each time that so many more responses have ended: 8, 16, 32, ...
_FIRST_LESSON: Final = 8
#: Open groups of which the first lessons are taken.
_LESSON_GROUPS: Final = 512


class MadeLesson(Protocol):
    """A lesson that is being made, now or in another thread: a future."""

    def done(self) -> bool: ...
    def result(self) -> LengthLesson: ...


LessonMaker: TypeAlias = Callable[[Callable[[], LengthLesson]], MadeLesson]


class _Foreseen(NamedTuple):
    """`outlooks`: by tokens made."""

    forecast: LengthForecast
    outlooks: dict[int, LengthOutlook]


def make_now(make: Callable[[], LengthLesson]) -> MadeLesson:
    """Makes a lesson at once: the same follows in each run of a simulation or a replay."""
    made = Future[LengthLesson]()
    made.set_result(make())
    return made


class RunForecasts:
    """`batch`: groups of a step; `learner`: one that has learnt, if there is one; `lessons`: makes its lessons."""

    def __init__(self, batch: int, learner: LengthLearner | None = None, lessons: LessonMaker = make_now) -> None:
        self.learner: Final = learner or LengthLearner()
        self.coverage: Final = ForecastCoverage()
        self.known = self.learner.known  # responses of the run have taught something
        self._lessons = lessons
        self._lesson: MadeLesson | None = None
        self._groups: dict[int, KnownGroup] = {}
        self._untaught: dict[int, KnownGroup] = {}  # of `_groups`: no sample is open
        self._batch = min(batch, _MOST_UNTAUGHT)
        self._left_out = 0  # ended groups that never teach
        self._changed: dict[int, None] = {}  # groups whose forecast is to be made anew, in this order
        self._watched: Iterator[int] = iter(())
        self._renewed = -1.0
        self._room = 0  # what a renewal may still make; below 0 after one group that took more
        self._grown_first = False  # in the next renewal
        self._idle = False  # nobody reads forecasts now: none is made
        self._ended, self._next_lesson = 0, _FIRST_LESSON
        self._alike: dict[tuple[float, ...], _Foreseen] = {}  # of untouched groups, by kind

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
        if not self._idle and group.forecast is None and group.untouched:
            group.forecast, group.outlooks = self._common(group)
        group.waiting.pop(rollout_id, None)
        group.running[rollout_id] = sample
        group.begun = True
        if sample.made and rollout_id not in group.knew:
            self._change(group)
        if self._idle or sample.made or not self.learner.known:
            return group
        if (outlook := self.outlook(group, rollout_id)) is not None:
            self.coverage.foresaw(rollout_id, outlook)
        return group

    def finish(self, rollout_id: str, place: int, tokens: int, *, whole: bool) -> KnownGroup | None:
        """Note a response that ended. `whole`: by itself, and not at its cap."""
        self.coverage.ended(rollout_id, tokens)
        group = self._closed(rollout_id, place)
        if group is not None:
            (group.finished if whole else group.stopped).append(tokens)
            self._ended += 1
            self._settle(group)
        return group

    def cancel(self, rollout_id: str, place: int) -> KnownGroup | None:
        """Note that a rollout is over without a whole response: what it made is a bound of its length."""
        self.coverage.forget(rollout_id)
        group = self._groups.get(place)
        sample = (group.running.get(rollout_id) or group.waiting.get(rollout_id)) if group else None
        made = sample.made if sample is not None else 0
        group = self._closed(rollout_id, place)
        if group is not None:
            if made:
                group.stopped.append(made)
            self._settle(group)
        return group

    def forget_open(self) -> None:
        """Forget which samples are open: the caller names them anew, then calls `settle_all`."""
        for group in self._groups.values():
            group.waiting, group.running, group.probe = {}, {}, ""

    def settle_all(self) -> None:
        """Note that all open samples were named."""
        ended = (one for one in self._groups.values() if not (one.waiting or one.running))
        for group in [one for one in ended if one.place not in self._untaught]:
            self._settle(group)

    # What is to be expected.

    def group(self, place: int) -> KnownGroup | None:
        return self._groups.get(place)

    def outlook(self, group: KnownGroup, rollout_id: str) -> LengthOutlook | None:
        """Tokens that an open sample has still to come, by what was known when its group's forecast was made. None if
        that is still to be made.
        """
        if group.forecast is None:
            return None
        knew = group.knew.get(rollout_id, 0)
        found = _outlook(group.forecast, group.outlooks, knew)
        sample = group.running.get(rollout_id) or group.waiting.get(rollout_id)
        grown = sample.made - knew if sample is not None else 0
        return LengthOutlook(*(max(1.0, one - grown) for one in found)) if grown > 0 else found

    def unstarted(self, group: KnownGroup) -> LengthOutlook:
        """The same, of a sample that has made nothing: by its prompt alone while the group's forecast is to be made."""
        if group.forecast is None:
            return _outlook(*self._common(group), 0)
        return _outlook(group.forecast, group.outlooks, 0)

    def renew(self, now: float, *, read: bool = True) -> list[KnownGroup]:
        """Teach what has ended, and make some forecasts anew. Returns the groups whose forecasts are new. `read`:
        somebody reads forecasts; else none is made, and ended groups still teach.
        """
        if now - self._renewed < _RENEW_EVERY_S:
            return []
        self._renewed, self._idle = now, not read
        self._learn()
        self._teach()
        if self._idle:
            return []
        renewed = list[KnownGroup]()
        self._room = min(self._room, 0) + _AT_ONCE
        if self._room > 0:
            for group in self._due():
                self._room -= self._foresee(group)
                renewed.append(group)
                if self._room <= 0:
                    break
        return renewed

    @property
    def groups(self) -> Iterable[KnownGroup]:
        """Those with open samples, and those that have not taught yet."""
        return self._groups.values()

    def _due(self) -> Iterator[KnownGroup]:
        """Groups whose forecasts are due: in turn one of which something was heard, and one that has made much. One
        large group may use up a renewal, so renewals begin with either kind in turn.
        """
        sources = [self._heard(), self._grown()]
        if self._grown_first:
            sources.reverse()
        self._grown_first = not self._grown_first
        while sources:
            for source in list(sources):
                if (group := next(source, None)) is None:
                    sources.remove(source)
                else:
                    yield group

    def _heard(self) -> Iterator[KnownGroup]:
        while self._changed:
            yield self._groups[next(iter(self._changed))]

    def _grown(self) -> Iterator[KnownGroup]:
        for _ in range(min(_WATCHED_AT_ONCE, len(self._groups) + 1)):
            place = next(self._watched, -1)
            if place < 0:
                self._watched = iter(list(self._groups))
            elif (group := self._groups.get(place)) is not None and group.due:
                yield group

    def _foresee(self, group: KnownGroup) -> int:
        """Make a group's forecast anew, with all outlooks that will be asked for. Returns how many were made."""
        self._changed.pop(group.place, None)
        group.outdated, group.knew = False, group.made()
        if group.untouched:
            group.forecast, group.outlooks = self._common(group)
            return 1
        group.forecast, group.outlooks = self.learner.forecast(group.knows(group.knew)), {}
        levels = {group.knew[name] for name in group.running} | ({0} if group.waiting else set())
        for made in levels:
            _outlook(group.forecast, group.outlooks, made)
        return 1 + len(levels)

    def _common(self, group: KnownGroup) -> _Foreseen:
        """What untouched groups of its kind have in common."""
        prior = self.learner.prior(group.prompt)
        kind = float(group.cap), round(prior.mean, 1), round(prior.variance, 1)
        found = self._alike.get(kind)
        if found is None:
            untouched = UnfinishedGroup(prompt=group.prompt, cap=group.cap)
            found = self._alike[kind] = _Foreseen(self.learner.forecast(untouched), {})
        return found

    # What ended groups teach.

    def _teach(self) -> None:
        """Begin a lesson if there is something to learn: one at a time."""
        if self._lesson is not None:
            return
        if self._untaught and (len(self._untaught) >= self._batch or len(self._untaught) == len(self._groups)):
            for place in self._untaught:
                del self._groups[place]
            taught, self._untaught = list(self._untaught.values()), {}
            if ended := [one.told() for one in taught if one.finished or one.stopped]:
                self._lesson = self._lessons(partial(self.learner.lesson, ended))
        elif not self._idle and not self.learner.known and self._ended >= self._next_lesson:
            self._next_lesson = 2 * self._ended
            some = (one for _, one in zip(range(_LESSON_GROUPS), self._groups.values(), strict=False) if one.begun)
            self._lesson = self._lessons(partial(self.learner.open_lesson, [one.knows(one.made()) for one in some]))
        self._learn()

    def _learn(self) -> None:
        """Take over a lesson that is made: all forecasts are outdated then."""
        if self._lesson is None or not self._lesson.done():
            return
        lesson, self._lesson = self._lesson, None
        self.learner.take(lesson.result())
        self.known = self.learner.known or self._next_lesson > _FIRST_LESSON
        self._alike.clear()
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

    def _closed(self, rollout_id: str, place: int) -> KnownGroup | None:
        group = self._groups.get(place)
        if group is None:
            return None
        group.waiting.pop(rollout_id, None)
        group.running.pop(rollout_id, None)
        return group

    def _settle(self, group: KnownGroup) -> None:
        if group.waiting or group.running:
            self._change(group)
        else:
            self._untaught[group.place] = group
            self._changed.pop(group.place, None)
            group.forecast, group.knew, group.outlooks = None, {}, {}  # thousands may wait until they teach
            if len(self._untaught) > _MOST_UNTAUGHT:  # nothing is taught while forecasts give way
                # One of any age, in even steps: of a step the long ones end last.
                self._left_out += 1
                ages = list(self._untaught)
                place = ages[int(self._left_out * _STEP % 1.0 * len(ages))]
                del self._untaught[place], self._groups[place]

    def _change(self, group: KnownGroup) -> None:
        group.outdated = True
        self._changed[group.place] = None


def _outlook(forecast: LengthForecast, outlooks: dict[int, LengthOutlook], made: int) -> LengthOutlook:
    found = outlooks.get(made)
    if found is None:
        found = outlooks[made] = forecast.outlook(made)
    return found
