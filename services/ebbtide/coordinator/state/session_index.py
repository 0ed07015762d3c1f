"""Finds the attached sessions that serve a run, and whether one of them has a free slot.

Invariant: exactly the attached sessions are here, each under its `run_id`. Sessions keep it up to date themselves.
"""

from collections import defaultdict
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # each refers to the other
    from ebbtide.coordinator.state.worker_session import WorkerSession


class SessionIndex:
    def __init__(self) -> None:
        self._by_run: defaultdict[str, dict[str, WorkerSession]] = defaultdict(dict)
        self._with_room: defaultdict[str, set[str]] = defaultdict(set)

    def serving(self, run_id: str) -> "Collection[WorkerSession]":
        """The sessions that are to serve the run; with "", those that serve none."""
        found = self._by_run.get(run_id)
        return found.values() if found else ()

    def has_room(self, run_id: str) -> bool:
        """Whether a session that serves the run has a free slot."""
        return bool(self._with_room.get(run_id))

    def add(self, session: "WorkerSession") -> None:
        self._by_run[session.run_id][session.session_id] = session
        self.count(session)

    def remove(self, session: "WorkerSession") -> None:
        self._forget(session, session.run_id)

    def moved(self, session: "WorkerSession", former: str) -> None:
        """Note that a session serves another run than the `former`."""
        if session.session_id in self._by_run.get(former, ()):
            self._forget(session, former)
            self.add(session)

    def count(self, session: "WorkerSession") -> None:
        """Note that a session has become full, or is full no longer."""
        if session.session_id not in self._by_run.get(session.run_id, ()):
            return
        if len(session.attempts) < session.slots:
            self._with_room[session.run_id].add(session.session_id)
        else:
            self._with_room[session.run_id].discard(session.session_id)

    def _forget(self, session: "WorkerSession", run_id: str) -> None:
        """Remove a session; a run without sessions leaves nothing behind."""
        sessions, room = self._by_run[run_id], self._with_room[run_id]
        sessions.pop(session.session_id, None)
        room.discard(session.session_id)
        if not sessions:
            del self._by_run[run_id], self._with_room[run_id]
