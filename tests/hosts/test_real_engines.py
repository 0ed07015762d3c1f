"""A short run on two hosts with vLLM, one of which is cut off in the middle of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.hosts.cluster import Cluster
from tests.hosts.run import ShortRun
from tests.support.waiting import wait_until
from tests.tiny_model import save_tiny_model

ENGINE: Final = {
    "engine": "vllm",
    "vllm_dtype": "float32",
    "vllm_enforce_eager": True,
    "vllm_threads": 1,
    "vllm_kv_cache_mib": 64,
}
pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]


@pytest.fixture
def run(cluster: Cluster, tmp_path: Path) -> Iterator[ShortRun]:
    """Of a model that vLLM can serve."""
    pytest.importorskip("vllm")
    run = ShortRun(cluster, save_tiny_model(tmp_path / "model", head=32))
    try:
        yield run
    finally:
        run.close()


async def test_a_run_on_real_engines_outlives_a_cut(cluster: Cluster, run: ShortRun) -> None:
    await cluster.boot(model=run.model, **ENGINE)
    run.submit(steps=12)
    await wait_until(lambda: all(cluster.ledger(host) for host in "ab"), timeout=60, what="both generate")
    await run.past(2)
    cluster.network.cut("b")
    await wait_until(lambda: cluster.logged("coordinator", "lost", "suspected"), timeout=60, what="b is missed")
    cluster.network.mend("b")
    await run.ended()
    assert all(cluster.ledger(host) for host in "ab"), "both generated"
