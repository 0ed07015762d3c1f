"""How long a request waits for room at the coordinator."""

from collections.abc import Sequence
from typing import Any

import pytest

from ebbtide.errors import NoCapacity
from ebbtide.gateway.runs.sdk_catalog import LeaseSource
from ebbtide.types.rollout import RolloutRequest


class FullLease:
    """Has room at the `room_at`th submit."""

    def __init__(self, room_at: int) -> None:
        self.room_at, self.submits = room_at, 0

    async def submit_rollouts(self, rollouts: Sequence[RolloutRequest], *, wait: bool) -> None:
        assert not wait
        self.submits += 1
        if self.submits < self.room_at:
            raise NoCapacity("full", retry_after_s=0.001)


def source(lease: Any, room_s: float) -> LeaseSource:
    client: Any = None
    return LeaseSource(client, lease, room_s=room_s)


async def test_a_submit_waits_for_room() -> None:
    lease = FullLease(room_at=3)
    await source(lease, room_s=60.0).submit([])
    assert lease.submits == 3


async def test_a_submit_that_finds_no_room_tells_when_to_come_back() -> None:
    with pytest.raises(NoCapacity) as refused:
        await source(FullLease(room_at=1 << 30), room_s=0.02).submit([])
    assert refused.value.retry_after_s == 0.001
