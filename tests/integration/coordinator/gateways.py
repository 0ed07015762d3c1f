"""Gateways at a scripted cluster, by the SDK, and time that passes for what they leave behind."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from ebbtide.auth.security import ClientSecurity
from ebbtide.client import Client, GatewayLease
from ebbtide.store.scripts import run_key
from ebbtide.types.rollout import RolloutKind, RolloutRequest, TokenChunk, Trajectory
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import pack_ids
from tests.fakes.scripted_worker import tokens
from tests.integration.coordinator.conftest import TOKEN, Cluster

OWNER = "user-a"


@contextlib.asynccontextmanager
async def gateway(cluster: Cluster, holder: str = "g1", run_id: str = "r") -> AsyncIterator[GatewayLease]:
    """A gateway's lease at the coordinator that serves now."""
    async with Client(cluster.server.address, security=ClientSecurity(token=TOKEN), patience_s=10.0) as client:
        lease = await client.acquire_gateway(run_id, holder=holder)
        try:
            yield lease
        finally:
            lease._renewals.cancel()  # as a process that dies: the lease is not given back


def asked(rollout_id: str, **more: Any) -> RolloutRequest:
    fields: dict[str, Any] = {
        "rollout_id": rollout_id, "group_id": "g", "episode_id": f"e.{rollout_id}", "prompt_ids": pack_ids([1, 2, 3]),
        "sampling": Sampling(max_tokens=64), "kind": RolloutKind.REQUEST,
    }  # fmt: skip
    return RolloutRequest(**(fields | more))


async def answer(lease: GatewayLease, rollout_id: str, offset: int = 0) -> tuple[bytes, TokenChunk]:
    """The tokens of a rollout from `offset` to its end, and the last chunk."""
    found = b""
    async for chunk in lease.tokens(rollout_id, offset):
        found += chunk.tokens
        last = chunk
    return found, last


def branch(episode_id: str, rollouts: int) -> Trajectory:
    return Trajectory(
        episode_id=episode_id, group_id="g", step=1, group_size=1, prompt_ids=pack_ids([1]), tokens=tokens(0, 2),
        loss_mask=b"\x01\x01", reward=1.0, rollouts=rollouts,
    )  # fmt: skip


async def pass_time(cluster: Cluster, seconds: float, run_id: str = "r") -> None:
    """Have everything that requests and sessions left behind be older, and delete what is due by now."""
    link = cluster.coordinator.link
    for name in ("REQUESTS", "IDLE", "OVER", "GONE"):
        key = run_key(run_id, name)
        for member in await link.call("ZRANGE", key, 0, -1):
            await link.call("ZINCRBY", key, round(-seconds * 1000), member)
    await cluster.coordinator.retention.round()


async def keys(cluster: Cluster, run_id: str = "r") -> set[str]:
    """The suffixes of the run's keys that requests and sessions have."""
    link, prefix = cluster.coordinator.link, run_key(run_id, "RUN").removesuffix("run")
    names = {name.decode().removeprefix(prefix) for name in await link.call("KEYS", f"{prefix}*")}
    own = (
        "rollout:",
        "tokens:",
        "requests",
        "sessions",
        "idle",
        "over",
        "session:",
        "turn",
        "kept",
        "gateways",
        "gone",
    )
    return {name for name in names if name.startswith(own) and name != "requestspans"}
