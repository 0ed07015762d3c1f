"""Grants leases to act for a run in a role. The fence decides; the expiry only says when others may claim."""

import asyncio
from typing import Final

from ebbtide.errors import NoCapacity, NotReady
from ebbtide.store.link.store_faults import StoreRefused
from ebbtide.store.rollout_rows import LeaseHolder
from ebbtide.store.store_keys import run_key
from ebbtide.store.topics.topic import Topic
from ebbtide.types.ids import new_fence
from ebbtide.types.run import GATEWAY, ROLES, LeaseRef, gateway_role

#: Gateways that end give their leases back.
_RETRY_AFTER_S: Final = 30.0


class LeaseTopic(Topic):
    async def claim(self, run_id: str, role: str, holder: str, ttl_s: float) -> LeaseRef:
        """Take the lease, which ends the former fence. Raises `NotReady` while another holder renews it, `NoCapacity`
        if the run has too many gateways. Each gateway has a lease of its own, in a role of its own.
        """
        fence: Final = new_fence()
        role = gateway_role(holder) if role == GATEWAY else role
        try:
            number = await self._write("lease_claim", run_id, role, fence, holder, round(ttl_s * 1000))
        except StoreRefused as refused:
            if refused.code == "GATEWAYS":
                text = f"run {run_id} has {refused.detail} gateways, and takes no more; stop some, or wait"
                raise NoCapacity(text, retry_after_s=_RETRY_AFTER_S) from None
            rest, _, other = refused.detail.partition(" ")
            raise NotReady(
                f"the {role} lease of run {run_id} is held by {other}; "
                f"it is free in {int(rest) / 1000:.1f} s unless it is renewed"
            ) from None
        await self._link.durable()
        return LeaseRef(run_id=run_id, role=role, fence=fence, number=int(number))

    async def held(self, run_id: str) -> dict[str, LeaseHolder]:
        """The holders of a run's roles."""
        keys = [run_key(run_id, "CLAIM", role) for role in ROLES]
        holders = await asyncio.gather(*(self._link.call("GET", key) for key in keys))
        rests = await asyncio.gather(*(self._link.call("PTTL", key) for key in keys))
        return {
            role: LeaseHolder(holder.decode(), max(0, rest) / 1000)
            for role, holder, rest in zip(ROLES, holders, rests, strict=True)
            if holder
        }

    async def renew(self, lease: LeaseRef, ttl_s: float) -> None:
        await self._leased("lease_renew", lease, round(ttl_s * 1000))

    async def release(self, lease: LeaseRef) -> None:
        await self._leased("lease_release", lease)
