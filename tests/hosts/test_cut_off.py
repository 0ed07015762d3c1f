"""A host whose cable is pulled in the middle of a run, and put back: the run finishes, and its books are right."""

from typing import Final

import pytest

from tests.hosts.cluster import SCRIPTED, Cluster
from tests.hosts.run import ShortRun
from tests.support.waiting import wait_until

#: host -> whose log tells that somebody missed it, and by which words.
MISSED: Final = {
    "a": ("coordinator", "lost", "suspected"),
    "b": ("coordinator", "lost", "suspected"),
    "control": ("a", "detached"),
    "trainer": ("trainer", "not renewed"),
}
pytestmark = [pytest.mark.hosts, pytest.mark.timeout(420)]


@pytest.mark.parametrize("host", MISSED)
async def test_a_run_outlives_a_host_that_is_cut_off_and_comes_back(host: str, cluster: Cluster, run: ShortRun) -> None:
    witness, *words = MISSED[host]
    await cluster.boot(**SCRIPTED)
    run.submit(steps=10)
    await run.past(1)
    if witness == "coordinator":  # a worker that has just begun a rollout has not ended it yet
        begun = len(cluster.ledger(host))
        await wait_until(lambda: len(cluster.ledger(host)) > begun, timeout=60, what=f"{host} begins a rollout")
    before = len(cluster.logged(witness, *words))
    cluster.network.cut(host)
    await wait_until(
        lambda: len(cluster.logged(witness, *words)) > before, timeout=60, interval=0.1, what=f"somebody missed {host}"
    )
    cluster.network.mend(host)
    await run.ended()
    if witness == "coordinator":
        assert sum(entry["rollouts"] for entry in cluster.logged(witness, *words)) > 0
        assert run.interruptions() > 0
