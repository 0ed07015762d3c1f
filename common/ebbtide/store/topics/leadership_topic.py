"""Decides which coordinator leads, by a term and a lease.

The term decides: one script sets it together with the lease, and from then on every write of another coordinator is
refused. The lease only says when another coordinator may take over by itself.
"""

from typing import Literal

from ebbtide.store.lua_scripts import script
from ebbtide.store.store_keys import FLEET, LEADER
from ebbtide.store.topics.topic import Topic

_How = Literal["seize", "wait", "renew", "release"]


class LeadershipTopic(Topic):
    async def leader(self) -> str | None:
        """The address of the lease's holder; None if it is free."""
        found = await self._link.call("GET", LEADER)
        return None if found is None else found.decode().partition(" ")[2]

    async def seize(self, address: str, ttl_s: float) -> None:
        """Lead from now on, even if another coordinator leads."""
        await self._lead("seize", address, ttl_s)

    async def take(self, address: str, ttl_s: float) -> str:
        """Lead from now on if the lease is free. Else returns the holder's address; on success, an empty text."""
        return await self._lead("wait", address, ttl_s)

    async def renew(self, address: str, ttl_s: float, *, patience_s: float) -> None:
        """Hold the lease for `ttl_s` from now on, also if it expired and nobody took it."""
        await self._lead("renew", address, ttl_s, patience_s=patience_s)

    async def release(self, *, patience_s: float) -> None:
        """Let another coordinator take over at once. The term stays until then."""
        await self._lead("release", "", 0.0, patience_s=patience_s)

    async def _lead(self, how: _How, address: str, ttl_s: float, *, patience_s: float | None = None) -> str:
        args = self._term, address or "-", round(ttl_s * 1000), how
        said: bytes = await self._link.run(script("lead"), FLEET, *args, patience_s=patience_s)
        return said.decode()
