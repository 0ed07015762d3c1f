"""What is asked of the store now and then for the metrics: how full it is, and what waits in it."""

import asyncio
from contextlib import suppress
from typing import Final

from ebbtide.coordinator import metrics
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.errors import StoreUnavailable
from ebbtide.store.store import Store

#: As often as Prometheus looks, by its own default.
_EVERY_S: Final = 15.0


async def measure_for_ever(state: CoordinatorState, store: Store) -> None:
    metrics.store_away_seconds.set_function(lambda: store.link.away_s)
    while True:
        with suppress(StoreUnavailable):  # the last figures stand, and the time that it is away says so
            await measure(state, store)
        await asyncio.sleep(_EVERY_S)


async def measure(state: CoordinatorState, store: Store) -> None:
    """Set the gauges. Raises `StoreUnavailable`."""
    room = await store.room()
    live = list(state.runs.values())
    held = [await store.runs.waiting(run.run_id) for run in live]
    metrics.store_bytes.set(room.used)
    metrics.store_limit_bytes.set(room.limit)
    shares = (used / run.spec.quota_bytes for run, (used, _) in zip(live, held, strict=True))
    metrics.quota_used.set(max(shares, default=0.0))
    metrics.trajectories.set(sum(count for _, count in held))
