"""Gives rules that place turns one by one what all of them need: room, loads, and rounds without other steps.

A rule alone needs no simulation: it places on the sessions of any coordinator, so a benchmark can have a live one
place by it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ebbtide.coordinator.rules.placement import Placement
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.simulator.world.rival_policies import RivalDecider, fits
from ebbtide.simulator.world.virtual_coordinator import VirtualCoordinator

#: Episodes whose engine is remembered.
_EPISODES: Final = 1 << 16


class TurnRule:
    """Invariant: `_engines` has the engine of each episode's last turn, by its session."""

    def __init__(self) -> None:
        self._engines: dict[str, str] = {}

    def choose(
        self, one: QueuedRollout, engines: Sequence[WorkerSession], loads: Mapping[str, int], now: float
    ) -> WorkerSession | None:
        """The engine for a turn; None: it waits. `engines`: all that may take it, full ones too."""
        raise NotImplementedError

    def order(self, run: RunState) -> Iterable[QueuedRollout]:
        """The queued turns, the next one first."""
        return list(run.queue)

    def move(self, engines: Sequence[WorkerSession], now: float) -> None:
        """Ask for turns that shall go on elsewhere. Most rules move none."""

    def place(self, run: RunState, engines: Sequence[WorkerSession], now: float) -> list[Placement]:
        loads = {engine.session_id: len(engine.attempts) for engine in engines}
        free = sum(engine.hello.slots - loads[engine.session_id] for engine in engines)
        placements: list[Placement] = []
        for one in self.order(run):
            if free <= 0:
                break
            chosen = self.choose(one, [engine for engine in engines if fits(one, engine, run)], loads, now)
            if chosen is None:
                continue
            free -= 1
            loads[chosen.session_id] += 1
            self._remember(one.episode_id, chosen.session_id)
            placements.append(Placement(one.rollout_id, chosen.session_id))
        return placements

    def last_engine(self, one: QueuedRollout, engines: Sequence[WorkerSession]) -> WorkerSession | None:
        """The engine of the episode's last turn, if it is there."""
        last = self._engines.get(one.episode_id)
        return next((engine for engine in engines if engine.session_id == last), None)

    def _remember(self, episode_id: str, session_id: str) -> None:
        self._engines.pop(episode_id, None)
        self._engines[episode_id] = session_id
        if len(self._engines) > _EPISODES:
            del self._engines[next(iter(self._engines))]


class TurnDecider(RivalDecider):
    """Decides by a rule for turns."""

    def __init__(self, coordinator: VirtualCoordinator, rule: TurnRule, *, keeps: bool) -> None:
        super().__init__(coordinator, keeps=keeps)
        self._rule = rule

    def place(self, run: RunState, engines: Sequence[WorkerSession], now: float) -> list[Placement]:
        return self._rule.place(run, engines, now)

    def move(self, run: RunState, engines: Sequence[WorkerSession], now: float) -> None:
        del run
        self._rule.move(engines, now)


def has_room(engine: WorkerSession, loads: Mapping[str, int]) -> bool:
    return loads[engine.session_id] < engine.hello.slots


def least_loaded(engines: Iterable[WorkerSession], loads: Mapping[str, int]) -> WorkerSession | None:
    """The engine with the fewest turns, of those with room; of equals, the first."""
    free = [engine for engine in engines if has_room(engine, loads)]
    return min(free, key=lambda engine: loads[engine.session_id]) if free else None
