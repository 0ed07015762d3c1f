"""Has Ebbtide's own rounds decide with some of their parts replaced.

The coordinator has no switches for comparisons. While a round decides, names that its code looks up stand for something
else; between rounds they are themselves, so other simulations of this process meet nothing of it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

from ebbtide.coordinator.dispatch import dispatch_round, rebalancer
from ebbtide.coordinator.dispatch.capacity import SlotLimits
from ebbtide.coordinator.dispatch.rebalancer import Rebalancer
from ebbtide.coordinator.dispatch.speeds import FleetSpeeds
from ebbtide.coordinator.forecasts.throughput import WorkerThroughput
from ebbtide.coordinator.rules.placement import place
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.simulator.world.ebbtide_policy import EbbtideDecider, EbbtidePolicy
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator


class Replaced(NamedTuple):
    """A name of a module or class, and what it stands for."""

    owner: Any
    name: str
    value: Any


@contextmanager
def replaced(parts: Sequence[Replaced]) -> Iterator[None]:
    before = [getattr(one.owner, one.name) for one in parts]
    for one in parts:
        setattr(one.owner, one.name, one.value)
    try:
        yield
    finally:
        for one, value in zip(reversed(parts), reversed(before), strict=True):
            setattr(one.owner, one.name, value)


#: Workers that are alike teach nothing of each other.
NO_KINDS: Final = Replaced(FleetSpeeds, "_kind", lambda _, session: (session.worker_id, ""))
#: Workers have as many slots as they are set to, whatever their memory holds.
NO_MEMORY: Final = Replaced(SlotLimits, "update", lambda *_: iter(()))


def placing(**terms: Any) -> Replaced:
    """`place` with terms of its own."""
    return Replaced(dispatch_round, "place", partial(place, **terms))


def learning(speed: Callable[[], WorkerThroughput]) -> Replaced:
    """What learns a worker's speed."""
    return Replaced(rebalancer, "WorkerThroughput", speed)


def told(speed: Callable[[str], WorkerThroughput]) -> Replaced:
    """What is known of a worker's speed, by its name."""

    def speed_of(self: Rebalancer, session: WorkerSession) -> WorkerThroughput:
        known = self._speeds
        if session.worker_id not in known:
            known[session.worker_id] = speed(session.worker_id)
        return known[session.worker_id]

    return Replaced(Rebalancer, "_speed_of", speed_of)


class ChangedDecider(EbbtideDecider):
    def __init__(
        self,
        coordinator: VirtualCoordinator,
        parts: Sequence[Replaced],
        *,
        balance: bool = True,
        keeps: bool = True,
    ) -> None:
        super().__init__(coordinator, balance=balance, keeps=keeps)
        self._parts = parts

    def round(self, now: float) -> float:
        with replaced(self._parts):
            return super().round(now)


class ChangedPolicy(EbbtidePolicy, frozen=True, kw_only=True):
    """Ebbtide with these parts replaced."""

    parts: tuple[Replaced, ...]

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        return ChangedDecider(coordinator, self.parts)
