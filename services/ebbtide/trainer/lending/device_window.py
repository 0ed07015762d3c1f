"""Lends the trainer's device while it waits for groups, for as long as a window says that is planned as it proceeds.

A trainer that streams has its device back as soon as the step ends sooner so: what its engines run continues elsewhere.
One that trains whole steps has it back once all groups are there. In between the coordinator is asked what is left of
each group and how fast the engines are. While it cannot be asked the device stays lent until all groups are there.
`OwnWindow` waits for groups in a trainer that lends nothing.

Invariant: `_lent` is the newest wish. Lost with the process; the next trainer begins with its device taken back, and
learns within a step. The sums of `WindowLedger` are those of the present step.
"""

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from math import inf
from statistics import median
from typing import Final, Protocol

from ebbtide import telemetry
from ebbtide.client import Lease
from ebbtide.errors import EbbtideError, LeaseSuperseded
from ebbtide.run_client import RunFollower
from ebbtide.runtime import race
from ebbtide.trainer.collectors import TrajectoryCollector
from ebbtide.trainer.lending.device_loan import TrainingDevice
from ebbtide.trainer.lending.step_window import AGAIN_S, LATEST_S, StepWindow, TrainedStep, TrainerStep
from ebbtide.types.remaining_work import RemainingWork
from ebbtide.types.rollout import Trajectory
from ebbtide.types.tokens import token_count

Enough = Callable[[], bool]


class TrainingWindow(Protocol):
    """When the trainer has its device."""

    async def open(self) -> None:
        """The next step's version is on its way."""
        ...

    async def close(self, whole: Enough) -> None:
        """Return once the device is the trainer's; at the latest when all groups of the step are there (`whole`)."""
        ...

    async def groups(self, enough: Enough, whole: Enough) -> None:
        """Wait until there are enough groups, with the device."""
        ...

    async def hold(self) -> bool:
        """Return once weights and moments can be read, between steps, until `rest`. Returns whether they could not
        before."""
        ...

    async def rest(self) -> None:
        """Nothing reads weights and moments until the next `close` or `hold`."""
        ...

    def trained(self, trajectories: Iterable[Trajectory], *, learning_s: float) -> dict[str, float]:
        """Learn from a step that was trained. Returns the values to report of its window."""
        ...


class _ReadableWindow:
    """Half of a `TrainingWindow`, of a trainer whose weights and moments can always be read."""

    async def hold(self) -> bool:
        return False

    async def rest(self) -> None:
        """They stay where they are."""


class OwnWindow(_ReadableWindow):
    """Of a device that is the trainer's for ever. `wait`: until there is enough."""

    def __init__(self, wait: Callable[[Enough], Awaitable[None]]) -> None:
        self._wait = wait

    async def open(self) -> None:
        """Nothing is lent."""

    async def close(self, whole: Enough) -> None:
        """Nothing comes back."""

    async def groups(self, enough: Enough, whole: Enough) -> None:  # noqa: ARG002 - the other kind needs it
        await self._wait(enough)

    def trained(self, trajectories: Iterable[Trajectory], *, learning_s: float) -> dict[str, float]:  # noqa: ARG002
        return {}


class WindowLedger:
    """`now` is in seconds of any one clock. Invariant: the sums are those of the present step."""

    def __init__(self) -> None:
        self._lent_at: float | None = None
        self._lent_s = self._back_s = 0.0
        self._cuts = self._missing = 0

    def opened(self, now: float) -> None:
        """A step begins."""
        self._lent_s = self._back_s = 0.0
        self._cuts = self._missing = 0
        self._lent_at = None if self._lent_at is None else now

    def lent(self, now: float) -> None:
        self._lent_at = now if self._lent_at is None else self._lent_at

    def asked(self, now: float, *, missing: int) -> None:
        """The device is wanted back, while so many groups of the step are missing."""
        if self._lent_at is not None:
            self._lent_s += now - self._lent_at
            self._lent_at = None
            self._cuts += missing > 0
            self._missing = missing

    def back(self, seconds: float) -> None:
        """It is back, so long after it was wanted."""
        self._back_s += seconds

    def values(self) -> dict[str, float]:
        """Seconds lent and seconds of waiting for its return; how often groups were cut, and of how many at last."""
        return {
            "lent_s": self._lent_s,
            "take_back_s": self._back_s,
            "window_cuts": float(self._cuts),
            "window_missing_groups": float(self._missing),
        }


log = telemetry.get_logger(__name__)

#: A coordinator that answers so much later than it was asked to is not waited for.
_ANSWER_S: Final = 5.0
_SILENT: Final = "the coordinator did not answer in time"
#: A question that waits follows an answer so much later: with many hosts that lend for moments, the fleet changes all
#: the time, and an answer about a large run takes the coordinator milliseconds.
_PAUSE_S: Final = 0.25
#: Interval of questions while they fail.
_FAILED_S: Final = 1.0
#: Wait for groups after which the trainer looks for what holds them back.
_STARVED_S: Final = 20.0
#: Switches and spells whose median is expected of the next one.
_SPELLS: Final = 16
#: A forecast is told again once it has changed by so much: a share of it, but no less than so many seconds.
_NEWS: Final = 0.2
_NEWS_S: Final = 1.0


class DeviceWindow(_ReadableWindow):
    """`starved`: awaited now and then while groups are missing for long. `fixed_s`:
    lend for so long in each step of a run that streams; 0.0: as it is planned.
    """

    def __init__(
        self,
        lease: Lease,
        following: RunFollower,
        collector: TrajectoryCollector,
        device: TrainingDevice,
        starved: Callable[[], Awaitable[None]],
        *,
        fixed_s: float = 0.0,
    ) -> None:
        self._lease, self._following, self._collector = lease, following, collector
        self._device, self._starved = device, starved
        self._spec, self._fixed_s = lease.run.spec, fixed_s
        self._window, self._ledger = StepWindow(), WindowLedger()
        self._left: RemainingWork | None = None
        self._lent = False
        self._told_s = 0.0  # how long it will stay lent, as the guard was told last
        self._lent_at: float | None = None  # until an engine of the device is seen to generate
        self._on_s, self._off_s, self._held_s = (deque[float](maxlen=_SPELLS) for _ in range(3))
        self._held_at = self._relieved_at = self._opened_at = time.monotonic()
        self._answered_at = 0.0
        self._failure = ""

    async def open(self) -> None:
        """The next step's version is on its way: lend the device, unless no window of the step is worth it."""
        self._opened_at = time.monotonic()
        self._ledger.opened(self._opened_at)
        streaming = self._spec.trainer.streaming
        if not streaming or self._collector.step >= self._spec.trainer.steps:
            self._lend(0.0)
            return
        await self._ask(0.0)
        await self._release_surplus()
        step, left = self._step(), self._left
        if left is None or self._fixed_s or self._window.lends(left, step):
            self._lend(self._spell_s())
        else:
            self._window.closed(left, step)
            log.info("the device is not lent in this step", reason=self._why())

    async def close(self, whole: Enough) -> None:
        """Return once the device is the trainer's: when the window is over, or all groups are there (`whole`)."""
        look_s = 0.0
        while self._lent and not whole():
            await self._look(look_s, whole)
            if whole() or (look_s := self._decide()) == 0.0:
                break
        if self._lent:
            await self._take_back(hand_over=not whole())

    async def groups(self, enough: Enough, whole: Enough) -> None:
        """Wait until there are enough groups. An engine elsewhere that is lost meanwhile may make the device worth
        lending once more.
        """
        while not enough():
            await self._look(AGAIN_S, enough)
            left, step = self._left, self._step()
            if not enough() and left is not None and self._window.lends_again(time.monotonic(), left, step):
                log.info("the device is lent again, as an engine elsewhere was lost", missing=step.missing)
                self._lend(0.0)
                await self.close(whole)

    def trained(self, trajectories: Iterable[Trajectory], *, learning_s: float) -> dict[str, float]:
        """Learn from a step that was trained. Returns the values to report of its window."""
        groups = defaultdict[str, list[Trajectory]](list)
        for one in trajectories:
            groups[one.group_id].append(one)
        responses = [[token_count(one.tokens) for one in group] for group in groups.values()]
        prompts = sum(len(group[0].prompt_ids) // 4 * len(group) for group in groups.values())
        tokens = prompts + sum(map(sum, responses))
        self._window.trained(TrainedStep(responses=responses, tokens=tokens, learning_s=learning_s))
        return self._ledger.values()

    async def _release_surplus(self) -> None:
        """Have the spot engine leave without which the step ends no later, if the run wants that."""
        if not self._spec.trainer.releases or self._left is None:
            return
        worker_id = self._window.surplus(self._left, self._step())
        if not worker_id:
            return
        log.info("a worker is released, as steps end no later without it", worker_id=worker_id)
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._lease.release_worker(worker_id)
        except LeaseSuperseded:
            raise
        except (TimeoutError, EbbtideError) as error:
            reason = str(error) or _SILENT
            log.warning("the worker is not released", worker_id=worker_id, reason=reason)

    def _decide(self) -> float:
        """Seconds until the next look; 0.0: the device is taken back now."""
        if not self._spec.trainer.streaming:
            self._lend(self._spell_s())
            return LATEST_S
        if self._fixed_s:
            return min(LATEST_S, max(0.0, self._opened_at + self._fixed_s - time.monotonic()))
        if self._left is None:
            return _FAILED_S
        look_s = self._window.look_s(self._left, self._step())
        if look_s > 0.0:
            self._lend(self._spell_s())
        return look_s

    def _lend(self, spell_s: float) -> None:
        if not self._lent:
            now = time.monotonic()
            self._ledger.lent(now)
            self._held_s.append(now - self._held_at)
            self._lent, self._lent_at = True, now
        elif abs(spell_s - self._told_s) <= max(_NEWS_S, _NEWS * self._told_s):
            return
        self._told_s = spell_s
        self._device.lend(spell_s)

    async def _take_back(self, *, hand_over: bool) -> None:
        asked = time.monotonic()
        step = self._step()
        self._ledger.asked(asked, missing=step.missing)
        if hand_over:
            log.info("the window is over", missing=step.missing, reason=self._why())
        await self._device.take_back(_usual(self._held_s), hand_over=hand_over)
        self._lent, self._held_at = False, time.monotonic()
        self._off_s.append(self._held_at - asked)
        self._ledger.back(self._held_at - asked)
        if hand_over and self._left is not None:
            self._window.closed(self._left, step)

    async def _look(self, wait_s: float, enough: Enough) -> None:
        """Ask again when the fleet changes, or after so long; end early once there are enough groups."""
        await race(self._following.until(enough), self._ask(wait_s))
        if time.monotonic() - self._relieved_at > _STARVED_S:
            self._relieved_at = time.monotonic()
            await self._starved()

    async def _ask(self, wait_s: float) -> None:
        fleet = self._left.fleet if self._left else ""
        if wait_s > 0.0:
            await asyncio.sleep(min(wait_s, max(0.0, self._answered_at + _PAUSE_S - time.monotonic())))
        try:
            async with asyncio.timeout(wait_s + _ANSWER_S):
                step = self._step()
                self._left = await self._lease.remaining_work(groups=step.missing, fleet=fleet, wait_s=wait_s)
        except LeaseSuperseded:
            raise
        except (TimeoutError, EbbtideError) as error:
            self._left = None
            if self._failure != (reason := str(error) or _SILENT):
                self._failure = reason
                log.warning("the device is lent without a plan", reason=reason)
            await asyncio.sleep(wait_s)
        else:
            self._failure, self._answered_at = "", time.monotonic()
            self._note_lent(self._left)

    def _note_lent(self, left: RemainingWork) -> None:
        """Learn how long the engines of the device take from the wish to lend until they generate."""
        mine = self._device.engines()
        if self._lent_at is not None and any(
            lent and name in mine for name, lent in zip(left.engines, left.lent, strict=True)
        ):
            self._on_s.append(time.monotonic() - self._lent_at)
            self._lent_at = None

    def _step(self) -> TrainerStep:
        collector, batch = self._collector, self._spec.batch
        complete = collector.whole_groups()
        missing = batch.groups_per_step - self._following.dropped[collector.step] - complete
        return TrainerStep(
            missing=max(0, missing),
            complete=complete,
            ready_tokens=collector.new_tokens(),
            local=self._device.engines(),
            on_s=_usual(self._on_s),
            off_s=_usual(self._off_s),
            any_version=batch.max_staleness > 0,
        )

    def _spell_s(self) -> float:
        """How long the device will probably stay lent; 0.0: unknown."""
        plan = self._window.plan
        if self._spec.trainer.streaming and self._fixed_s:
            return self._fixed_s
        if self._spec.trainer.streaming and plan is not None and plan.window_s < inf:
            return plan.window_s
        return self._window.spell_s(self._left, self._step()) if self._left else 0.0

    def _why(self) -> str:
        if self._fixed_s:
            return f"the window is set to {self._fixed_s:g} s"
        return self._window.plan.why if self._window.plan else ""


def _usual(spells_s: Sequence[float]) -> float:
    """0.0: unknown."""
    return median(spells_s) if spells_s else 0.0
