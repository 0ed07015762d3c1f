"""Tells workers what their rollouts have still to come, once that has changed much since they were told.

Only workers with the capability `forecasts` hear of it, each once a second at most. In a large fleet some have their
turn in each round.

Invariant: `_looked` has when each session had its turn. Lost with the process: assignments and attachments tell anew.
"""

from collections.abc import Iterator
from typing import Final

from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.running_attempt import AttemptForecast, RunningAttempt
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.v1 import fleet_pb2

_EVERY_S: Final = 1.0
#: Sessions in one round: with 64 rollouts each they take some two milliseconds.
_AT_ONCE: Final = 16
CAPABILITY: Final = "forecasts"


class ForecastSender:
    def __init__(self, state: CoordinatorState) -> None:
        self._state = state
        self._looked: dict[str, float] = {}
        self._turns: Iterator[str] = iter(())
        self.heard = False  # some worker listens, as of the last turn

    def send(self, now: float) -> None:
        """Tell the next workers what has changed."""
        for _ in range(min(_AT_ONCE, len(self._state.sessions))):
            session_id = next(self._turns, "")
            if not session_id:
                listening = [one.session_id for one in self._state.sessions.values() if _listens(one)]
                self._turns, self.heard = iter(listening), bool(listening)
                self._looked = {name: at for name, at in self._looked.items() if name in self._state.sessions}
                return
            session = self._state.sessions.get(session_id)
            if session is not None and now - self._looked.get(session_id, -_EVERY_S) >= _EVERY_S:
                self._looked[session_id] = now
                if changed := [(one, forecast) for one in session.attempts.values() if (forecast := one.news())]:
                    session.send(_message(changed))


def _listens(session: WorkerSession) -> bool:
    return CAPABILITY in session.hello.capabilities and not session.gone


def _message(changed: list[tuple[RunningAttempt, AttemptForecast]]) -> fleet_pb2.CoordinatorMessage:
    forecasts = [
        fleet_pb2.Forecasts.Forecast(
            attempt_id=attempt.attempt_id,
            expected_tokens=one.expected_tokens,
            longest_tokens=one.longest_tokens,
            stored=one.stored,
        )
        for attempt, one in changed
    ]
    return fleet_pb2.CoordinatorMessage(forecasts=fleet_pb2.Forecasts(forecasts=forecasts))
