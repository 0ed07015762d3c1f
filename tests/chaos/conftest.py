"""What chaos needs: a cluster to break, and a run on it whose tokens and rollouts are counted."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.load import Begin, Load


@pytest.fixture
async def begin(cluster: Cluster) -> AsyncIterator[Begin]:
    """Boots the cluster, with `boot`'s arguments, and begins a run on it."""
    async with AsyncExitStack() as stack:

        async def beginning(**settings: Any) -> Load:
            load = await Load.begin(cluster, await cluster.boot(**settings))
            stack.push_async_callback(load.close)
            return load

        yield beginning
