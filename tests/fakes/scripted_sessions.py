"""Sessions as the coordinator keeps them, in memory: any number of gateways may share them."""

import asyncio

from msgspec.structs import replace

from ebbtide.errors import BudgetSpent, NotFound, NotReady
from ebbtide.types.rollout import Trajectory
from ebbtide.types.run import Run
from ebbtide.types.session import MeteredKey, Session, SessionEnd, SessionState, SessionTurn, TurnPage


class ScriptedSessions:
    """`page` turns are told at once. `trajectories` are what sessions ended as."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.page = 2
        self.stored: dict[str, tuple[Session, list[SessionTurn]]] = {}
        self.forgotten: set[str] = set()
        self.trajectories: list[Trajectory] = []
        self.verifier_data: dict[str, bytes] = {}

    async def open_session(self, session_id: str, owner: str, *, group_id: str = "", record: bytes = b"") -> Session:
        if session_id in self.forgotten:
            raise NotReady(f"session {session_id} has ended")
        made = Session(
            session_id=session_id, run_id=self.run.run_id, owner=owner, group_id=group_id or session_id, record=record
        )
        return self.stored.setdefault(session_id, (made, []))[0]

    async def add_turn(
        self, session_id: str, owner: str, turn: SessionTurn, *, key: MeteredKey | None = None, tokens: int = 0
    ) -> SessionTurn:
        await asyncio.sleep(0)
        if key is not None and key.limits.tokens and tokens > key.limits.tokens:
            raise BudgetSpent(f"{tokens} tokens are too many", retry_after_s=0.0)
        session, turns = self._of(session_id, owner)
        known = next((one for one in turns if one.request_id == turn.request_id), None)
        if known is not None:
            return known
        if session.state is not SessionState.OPEN:
            raise NotReady(f"session {session_id} has ended")
        turns.append(replace(turn, number=len(turns) + 1))
        self.stored[session_id] = (replace(session, turns=len(turns)), turns)
        return turns[-1]

    async def read_turns(self, session_id: str, owner: str, after: int = 0) -> TurnPage:
        await asyncio.sleep(0)  # others come between
        session, turns = self._of(session_id, owner)
        told = turns[after : after + self.page]
        return TurnPage(session=session, turns=tuple(told), more=after + len(told) < len(turns))

    async def end_session(self, how: SessionEnd) -> Session:
        session, turns = self._of(how.session_id, how.owner)
        if session.state is SessionState.OPEN:
            self.trajectories += how.trajectories
            state = SessionState.DROPPED if how.drop_reason else SessionState.COMPLETED
            state = SessionState.VERIFYING if how.verifier else state
            record, verifier = how.record or session.record, how.verifier
            session = replace(session, state=state, drop_reason=how.drop_reason, record=record, verifier=verifier)
            self.verifier_data[how.session_id] = how.data
            self.stored[how.session_id] = (session, turns)
        return session

    async def sessions(self, owner: str) -> list[Session]:
        return [replace(one, record=b"") for one, _ in self.stored.values() if one.owner == owner]

    def forget(self) -> None:
        """Forget all sessions, as after their time."""
        self.forgotten |= self.stored.keys()
        self.stored.clear()

    def _of(self, session_id: str, owner: str) -> tuple[Session, list[SessionTurn]]:
        found = self.stored.get(session_id)
        if found is None or found[0].owner != owner:
            raise NotFound(f"no session {session_id}")
        return found
