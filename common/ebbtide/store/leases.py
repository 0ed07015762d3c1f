"""Leases: who may act for a run in which role. The fence counts; the expiry only says when another may claim."""

from typing import Final

from ebbtide.errors import NotReady
from ebbtide.store.faults import Refused
from ebbtide.store.topic import Topic
from ebbtide.types.ids import new_fence
from ebbtide.types.run import LeaseRef


class Leases(Topic):
    async def claim(self, run_id: str, role: str, holder: str, ttl_s: float) -> LeaseRef:
        """Take the lease, ending the fence before it. Raises `NotReady` while another holder keeps it renewed."""
        fence: Final = new_fence()
        try:
            await self._write("lease_claim", run_id, role, fence, holder, round(ttl_s * 1000))
        except Refused as refused:
            rest, _, other = refused.detail.partition(" ")
            raise NotReady(
                f"the {role} lease of run {run_id} is held by {other}; "
                f"it is free in {int(rest) / 1000:.1f} s unless it is renewed"
            ) from None
        return LeaseRef(run_id=run_id, role=role, fence=fence)

    async def renew(self, lease: LeaseRef, ttl_s: float) -> None:
        await self._leased("lease_renew", lease, round(ttl_s * 1000))

    async def release(self, lease: LeaseRef) -> None:
        await self._leased("lease_release", lease)
