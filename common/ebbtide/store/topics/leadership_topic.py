"""Which coordinator leads: the term that every write is checked against, and the lease by which others learn that its
holder is gone.

The term is what counts: it is set together with the lease, in one script, and from then on everything that another
coordinator sends is refused. The lease only says when another may take over by itself.
"""

from typing import Literal

from ebbtide.store.lua_scripts import script
from ebbtide.store.store_keys import FLEET, LEADER
from ebbtide.store.topics.topic import Topic

_How = Literal["seize", "wait", "renew", "release"]


class LeadershipTopic(Topic):
    async def leader(self) -> str | None:
        """The address of the coordinator that holds the lease; None if nobody does."""
        found = await self._link.call("GET", LEADER)
        return None if found is None else found.decode().partition(" ")[2]

    async def seize(self, address: str, ttl_s: float) -> None:
        """Lead from now on, whoever does."""
        await self._lead("seize", address, ttl_s)

    async def take(self, address: str, ttl_s: float) -> str:
        """Lead from now on if nobody holds the lease. Returns the address of who does, or an empty text."""
        return await self._lead("wait", address, ttl_s)

    async def renew(self, address: str, ttl_s: float, *, patience_s: float) -> None:
        """Hold the lease for `ttl_s` from now on, also where it was over and nobody took it."""
        await self._lead("renew", address, ttl_s, patience_s=patience_s)

    async def release(self, *, patience_s: float) -> None:
        """Let another take over at once. The term stays, until it does."""
        await self._lead("release", "", 0.0, patience_s=patience_s)

    async def _lead(self, how: _How, address: str, ttl_s: float, *, patience_s: float | None = None) -> str:
        args = self._term, address or "-", round(ttl_s * 1000), how
        said: bytes = await self._link.run(script("lead"), FLEET, *args, patience_s=patience_s)
        return said.decode()
