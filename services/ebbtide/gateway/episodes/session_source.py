"""Says what the gateway needs of the coordinator to keep sessions."""

from typing import Protocol

from ebbtide.gateway.generation.rollout_source import RolloutSource
from ebbtide.types.key_usage import MeteredKey
from ebbtide.types.session import Session, SessionEnd, SessionTurn, TurnPage


class SessionSource(RolloutSource, Protocol):
    """The sessions of one run. All calls may be repeated, and wait while the coordinator is away.

    Sessions of other owners are not there: `NotFound`.
    """

    async def open_session(self, session_id: str, owner: str, *, group_id: str = "", record: bytes = b"") -> Session:
        """Raises `NotReady` for one that has ended and was forgotten, `NoCapacity` while the quota is used up."""

    async def add_turn(
        self, session_id: str, owner: str, turn: SessionTurn, *, key: MeteredKey | None = None, tokens: int = 0
    ) -> SessionTurn:
        """The turn of this request as it is stored. Raises `NotReady` if the session has ended, `NoCapacity`, and if
        `key` has no room for as many tokens `RateLimited` or `BudgetSpent`.
        """

    async def read_turns(self, session_id: str, owner: str, after: int = 0) -> TurnPage:
        """The session with its record, and its turns after a number."""

    async def end_session(self, how: SessionEnd) -> Session:
        """End a session, or return how it ended."""

    async def sessions(self, owner: str) -> list[Session]:
        """The owner's sessions without records, in the order in which they were opened."""
