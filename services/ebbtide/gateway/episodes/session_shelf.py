"""Keeps the sessions that were played lately, within a bound on memory.

Invariant: a session in use stays; of the others the one that was used longest ago goes first. A session that went is
read again from the coordinator by its next turn.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ebbtide.client.gateway_lease import GatewayLease
from ebbtide.errors import NoCapacity
from ebbtide.gateway.episodes.live_session import LiveSession, LongReaders
from ebbtide.gateway.player import RequestPlayer
from ebbtide.types.session import SessionState

#: Books to keep, as an empty one takes memory, too.
_MOST: Final = 8192


class SessionShelf:
    """The sessions of all runs that this gateway serves."""

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes, self._long_readers = kept_bytes, LongReaders()
        self._live: OrderedDict[tuple[str, str], LiveSession] = OrderedDict()
        #: Opened through this gateway since the owner's sessions were counted.
        self._counted: dict[tuple[str, str], int] = {}

    def __len__(self) -> int:
        return len(self._live)

    @contextmanager
    def used(self, lease: GatewayLease, player: RequestPlayer, session_id: str, owner: str) -> Iterator[LiveSession]:
        """A session that stays while the block runs. It may be new here."""
        key = (lease.run.run_id, session_id)
        live = self._live.get(key)
        if live is None:
            live = self._live[key] = LiveSession(session_id, owner, lease, player, self._long_readers)
        live.lease, live.player = lease, player  # the run's lease may be another one by now
        self._live.move_to_end(key)
        live.users += 1
        try:
            yield live
        finally:
            live.users -= 1
            if live.session is None or live.session.state is not SessionState.OPEN:
                self._forget(key, live)
            self._shrink()

    async def count(self, lease: GatewayLease, owner: str, most: int) -> None:
        """Count a session that is about to be opened. Raises `NoCapacity` if the owner has `most` open ones."""
        key = (lease.run.run_id, owner)
        if key not in self._counted or self._counted[key] >= most:
            sessions = await lease.sessions(owner)
            self._counted[key] = sum(one.state is SessionState.OPEN for one in sessions)
        if self._counted[key] >= most:
            raise NoCapacity(f"{owner} has {most} open sessions, the most that one key may have; end some")
        self._counted[key] += 1

    def close(self) -> None:
        for live in self._live.values():
            live.close()
        self._live.clear()

    def _shrink(self) -> None:
        size = sum(live.bytes for live in self._live.values()) if len(self._live) > 1 else 0
        for key, live in list(self._live.items()):
            if size <= self._kept_bytes and len(self._live) <= _MOST:
                return
            if not live.users:
                self._forget(key, live)
                size -= live.bytes

    def _forget(self, key: tuple[str, str], live: LiveSession) -> None:
        if not live.users and self._live.get(key) is live:
            del self._live[key]
            live.close()
