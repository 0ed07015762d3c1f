"""The exchange over torch.distributed: what remains of one that is closed."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from ebbtide.client.publisher.torch_exchange import TorchExchange
from ebbtide.errors import Unavailable


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank that torch has brought together with nobody."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_an_exchange_that_is_closed_leaves_no_group_and_says_that_nobody_answers(alone: None) -> None:
    before = dist.distributed_c10d._world.pg_map.copy()
    exchange = TorchExchange()
    assert len(dist.distributed_c10d._world.pg_map) == len(before) + 1
    for _ in range(2):
        exchange.close()
        assert dist.distributed_c10d._world.pg_map == before
    exchange.rank = 1
    for call in (exchange.gather, exchange.broadcast):
        with pytest.raises(Unavailable, match="rank 0 of the trainer is gone"):
            call(b"anything")
