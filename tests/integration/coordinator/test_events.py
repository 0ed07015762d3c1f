"""A run's events: facts stay, chatter is capped, and watchers see both in the order in which they were said."""

from typing import Any

from ebbtide.store.scripts import LuaScript, script
from ebbtide.v1 import fleet_pb2, runs_pb2, types_pb2
from tests.support.waiting import wait_until


async def report(run: Any, *kinds: str) -> None:
    events = [runs_pb2.RunEvent(kind=kind, values={"step": number}) for number, kind in enumerate(kinds)]
    await run.cluster.call(run.cluster.runs.Report, runs_pb2.ReportRequest(lease=run.lease, events=events))


async def watch(run: Any, cursor: str = "") -> list[Any]:
    """All events of a run that has ended."""
    request = runs_pb2.WatchRunRequest(run_id=run.run_id, cursor=cursor)
    return [event async for event in run.cluster.runs.WatchRun(request)]


async def test_what_drivers_and_trainers_rebuild_themselves_from_is_never_trimmed(
    cluster: Any, monkeypatch: Any
) -> None:
    def frugal(name: str) -> LuaScript:
        text = script(name).text.decode()
        return LuaScript(
            name, text.replace("KEPT_PER_CHATTER, CHATTER_BYTES = 8,", "KEPT_PER_CHATTER, CHATTER_BYTES = 160,")
        )

    assert "KEPT_PER_CHATTER, CHATTER_BYTES = 160," in frugal("report").text.decode()
    monkeypatch.setattr("ebbtide.store.connection.script", frugal)
    run = await cluster.run()
    facts = ("step", "evaluation", "checkpoint", "group_dropped", "attached")
    await report(run, *facts)
    for _ in range(5):
        await report(run, *["warning"] * 100)
    await run.finish()
    kinds = [event.kind for event in await watch(run)]
    assert [kind for kind in kinds if kind != "warning"] == ["status", "status", "version", *facts, "status"]
    assert kinds.count("warning") == 102  # one in 160 of all that a run keeps


async def test_facts_and_chatter_come_in_the_order_in_which_they_were_said(cluster: Any) -> None:
    run = await cluster.run()
    said = ["step", "warning", "note", "step", "step", "note"] * 200  # several pages
    await report(run, *said)
    await run.finish()
    events = await watch(run)
    assert [event.kind for event in events[3:-1]] == said
    assert [event.cursor for event in await watch(run, events[500].cursor)] == [e.cursor for e in events[501:]]


async def test_a_worker_that_cannot_install_a_version_warns_of_it_once(cluster: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("ebbtide.coordinator.fleet.worker_registry._INSTALL_PAUSE_S", 0.01)
    run = await cluster.run()
    worker = await cluster.worker("w1", installs=False)
    for tries in range(1, 4):
        await wait_until(lambda: len(worker.installed) >= tries)  # noqa: B023 - awaited at once
        version = types_pb2.PolicyVersion(policy="policy", version=1)
        await worker.say(install_failed=fleet_pb2.InstallFailed(version=version, run_id="r", message="no room"))
    await wait_until(lambda: len(worker.installed) >= 4)
    await run.finish()
    warnings = [event.message for event in await watch(run) if event.kind == "warning"]
    assert warnings == ["worker w1 could not install version 1: no room"]


async def test_a_model_given_by_its_path_is_known_by_its_last_name(cluster: Any) -> None:
    await cluster.worker("w1")  # which names its model m
    for run_id, model, warned in (("right", "/models/m", False), ("wrong", "/m/other", True)):
        run = await cluster.run(run_id, model=model)
        await run.finish()
        assert any(event.kind == "warning" for event in await watch(run)) is warned
