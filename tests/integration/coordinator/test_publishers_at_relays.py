"""A run that the store forgot, at a relay that has its versions still and holds it to its key."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbtide.auth.security import ClientSecurity
from ebbtide.client import Client
from ebbtide.errors import AlreadyExists
from tests.integration.coordinator.conftest import TOKEN
from tests.integration.weight_relay import fanout
from tests.support.redis_servers import EmbeddedRedis
from tests.support.waiting import wait_until

SPEC: dict[str, Any] = {"name": "r", "model": "m", "environment": {"name": "e"}, "trainer": {"name": "external"}}


def weights(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"w": np.random.default_rng(seed).normal(size=1000).astype(np.float32)}


async def test_training_goes_on_under_the_same_id_and_key_with_the_first_number_that_is_free(
    tmp_path: Path, cluster_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fanout, "TOKEN", TOKEN)  # one for both services, as in any cluster
    security = ClientSecurity(token=TOKEN)
    with EmbeddedRedis(tmp_path / "redis") as store:
        async with (
            cluster_with(store.url) as cluster,
            fanout.running(tmp_path / "relay") as relay,
            Client(cluster.server.address, relay.address, security=security) as client,
        ):
            await client.submit(SPEC, "r")
            async with client.claim("r") as lease:
                before = [await lease.publish(weights(step), step=step) for step in range(2)]
                store.come_back(knowing=0)
                await wait_until(lambda: not cluster.coordinator.state.runs, what="the coordinator noticing")
            await client.submit(SPEC, "r")
            async with client.claim("r") as lease:
                for _ in before:
                    with pytest.raises(AlreadyExists):
                        await lease.publish(weights(7), step=0)
                version = await lease.publish(weights(7), step=0)
                assert version.version == 3
                manifest, _ = await client.fetch_weights("r")
                assert manifest.version == version
