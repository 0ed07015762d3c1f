"""What another release left in the store, and this one cannot read, stands in nobody's way."""

from typing import Any

import pytest

from ebbtide.errors import NotReady
from ebbtide.store.scripts import run_key
from ebbtide.v1 import runs_pb2


async def test_an_ended_run_that_cannot_be_read_is_passed_over_and_not_forgotten(cluster: Any) -> None:
    run, link = await cluster.run("a"), cluster.coordinator.link
    await run.finish()
    await cluster.run("b")
    spec = await link.call("HGET", run_key("a", "RUN"), "spec")
    await link.call("HSET", run_key("a", "RUN"), "spec", spec[:-1] + b',"tempo":2}')
    for _ in range(2):
        listed = await cluster.call(cluster.runs.ListRuns, runs_pb2.ListRunsRequest())
        assert [one.run_id for one in listed.runs] == ["b"]
    with pytest.raises(NotReady, match=r"spec of run a is of another release of Ebbtide.*`tempo`"):
        await run.get()
    await cluster.restart()  # it is no live run: whoever starts has no need to read it
    await cluster.coordinator.link.call("HSET", run_key("a", "RUN"), "spec", spec)
    listed = await cluster.call(cluster.runs.ListRuns, runs_pb2.ListRunsRequest())
    assert [one.run_id for one in listed.runs] == ["a", "b"]


async def test_a_live_run_whose_spec_has_a_key_of_the_commit_before_goes_on(cluster: Any) -> None:
    run, link = await cluster.run("a"), cluster.coordinator.link
    spec = await link.call("HGET", run_key("a", "RUN"), "spec")
    assert b'"tail"' not in spec
    await link.call("HSET", run_key("a", "RUN"), "spec", spec[:-1] + b',"tail":{"adaptive_rewards":true}}')
    await cluster.restart()
    assert "adaptive_rewards" not in str(await run.get())
    assert list(cluster.coordinator.state.runs) == ["a"]
