"""A short run on two hosts with vLLM, one of which is cut off in the middle of it."""

from typing import Final

import pytest

from ebbtide.testing import wait_until
from tests.hosts.cluster import Cluster
from tests.hosts.run import ShortRun

ENGINE: Final = {
    "engine": "vllm",
    "vllm_dtype": "float32",
    "vllm_enforce_eager": True,
    "vllm_threads": 1,
    "vllm_kv_cache_mib": 64,
}
pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]


async def test_a_run_on_real_engines_outlives_a_cut(cluster: Cluster, run: ShortRun) -> None:
    pytest.importorskip("vllm")
    await cluster.boot(model=run.model, **ENGINE)
    run.submit(steps=12)
    await run.past(2)
    cluster.network.cut("b")
    await wait_until(lambda: cluster.logged("coordinator", "lost", "suspected"), timeout=60, what="b is missed")
    cluster.network.mend("b")
    await run.ended()
    assert all(cluster.ledger(host) for host in "ab"), "both generated"
