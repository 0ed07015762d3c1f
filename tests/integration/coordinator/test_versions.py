"""Which weights make which tokens, and which worker serves which run."""

from typing import Any

from ebbtide.v1 import fleet_pb2, types_pb2
from tests.support.waiting import wait_until

STOP = types_pb2.FINISH_REASON_STOP


async def test_a_rollout_waits_for_a_worker_with_a_version_within_its_bounds(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1", installs=False)
    await run.submit("old", max_version=1)
    await run.submit("any")
    await wait_until(lambda: worker.installed == [1])
    assert not worker.assigned
    version = (await run.get()).newest
    await worker.say(installed=fleet_pb2.Installed(version=version, run_id="r"))
    await worker.has("old", "any")
    await run.announce(step=1)
    await run.submit("new", min_version=2)
    await worker.add("any", 0, 1, STOP)
    assert worker.installed == [1]  # "old" holds it at version 1
    await worker.add("old", 0, 1, STOP)
    await wait_until(lambda: worker.installed == [1, 2])
    assert "new" not in worker.assigned
    await worker.say(installed=fleet_pb2.Installed(version=(await run.get()).newest, run_id="r"))
    await worker.has("new")


async def test_watchers_are_told_how_long_an_install_took_and_held_generation(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1", installs=False)
    await wait_until(lambda: worker.installed == [1])
    version = (await run.get()).newest
    await worker.say(installed=fleet_pb2.Installed(version=version, run_id="r", pull_s=1.5, pause_s=0.25))
    (event,) = await run.events("installed", 1)
    assert dict(event.values) == {"version": 1.0, "pull_s": 1.5, "pause_s": 0.25}
    assert dict(event.labels) == {"worker": "w1"}


async def test_a_worker_that_has_the_version_already_is_no_install_to_tell_of(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1", installs=False)
    await wait_until(lambda: worker.installed == [1])
    version = (await run.get()).newest
    for pause_s in (0.0, 0.25):
        pull_s = 2 * pause_s
        await worker.say(installed=fleet_pb2.Installed(version=version, run_id="r", pull_s=pull_s, pause_s=pause_s))
    (event,) = await run.events("installed", 1)
    assert event.values["pause_s"] == 0.25


async def test_a_worker_updates_in_flight_where_nothing_holds_it(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1")
    await run.submit("a", min_version=1)
    await worker.has("a")
    await run.announce(step=1)
    await wait_until(lambda: worker.installed == [1, 2])
    assert not worker.cancelled


async def test_one_worker_goes_back_for_rollouts_with_a_ceiling(cluster: Any) -> None:
    run = await cluster.run()
    workers = [await cluster.worker(name) for name in ("w1", "w2")]
    await run.announce(step=1)
    await wait_until(lambda: all(2 in worker.installed for worker in workers))
    await run.submit("old", max_version=1)
    await run.submit("new", min_version=2)
    await wait_until(lambda: sum("old" in worker.assigned for worker in workers) == 1)
    keeper = next(worker for worker in workers if "old" in worker.assigned)
    other = next(worker for worker in workers if worker is not keeper)
    assert keeper.installed[-1] == 1
    await other.has("new")
    await keeper.add("old", 0, 1, STOP)
    await wait_until(lambda: keeper.installed[-1] == 2)


async def wants_an_older_version(cluster: Any, monkeypatch: Any) -> tuple[Any, Any]:
    """A run whose rollout "old" needs version 1, and its worker, which has version 2 and installs nothing any more."""
    monkeypatch.setattr("ebbtide.coordinator.fleet.worker_registry._INSTALL_PAUSE_S", 0.02)
    run = await cluster.run()
    worker = await cluster.worker("w1")
    await run.announce(step=1)
    await wait_until(lambda: 2 in worker.installed)
    worker.installs = False
    await run.submit("old", max_version=1)
    return run, worker


async def test_rollouts_whose_version_is_gone_become_dead_letters(cluster: Any, monkeypatch: Any) -> None:
    run, worker = await wants_an_older_version(cluster, monkeypatch)
    for tries in range(1, 4):
        await wait_until(lambda: worker.installed.count(1) >= tries)  # noqa: B023 - awaited at once
        version = types_pb2.PolicyVersion(policy="policy", version=1)
        await worker.say(install_failed=fleet_pb2.InstallFailed(version=version, run_id="r", message="not kept"))
    (letter,) = await run.finished(1)
    assert letter.reason == types_pb2.FINISH_REASON_DEAD_LETTERED
    assert "version" in letter.message
    assert "not kept" in (await run.events("warning", 1))[0].message


async def test_a_version_is_not_given_up_because_the_relay_is_away(cluster: Any, monkeypatch: Any) -> None:
    _, worker = await wants_an_older_version(cluster, monkeypatch)
    version = types_pb2.PolicyVersion(policy="policy", version=1)
    away = fleet_pb2.InstallFailed(version=version, run_id="r", message="relay away", unreachable=True)
    for tries in range(1, 6):
        await wait_until(lambda: worker.installed.count(1) >= tries)  # noqa: B023 - awaited at once
        await worker.say(install_failed=away)
    worker.installs = True
    await worker.has("old")
    assert worker.installed[-1] == 1


async def test_several_runs_share_the_fleet(cluster: Any) -> None:
    one, two = await cluster.run("one"), await cluster.run("two")
    await one.submit("a1", "a2")  # both have work before anybody serves: a worker ends its rollouts before it goes over
    await two.submit("b1", "b2")
    workers = [await cluster.worker(name, slots=4) for name in ("w1", "w2")]
    await wait_until(lambda: {r for worker in workers for r in worker.assigned} == {"a1", "a2", "b1", "b2"})
    for worker in workers:
        runs = {assignment.attempt.run_id for assignment in worker.assigned.values()}
        assert len(runs) == 1
        await worker.send(*(worker.delta(name, 0, 1, STOP) for name in list(worker.assigned)))
    assert len(await one.finished(2)) == len(await two.finished(2)) == 2


async def test_one_worker_alternates_between_runs_that_both_have_work(cluster_with: Any) -> None:
    async with cluster_with(timeslice_s=0.2) as cluster:
        runs = [await cluster.run("one"), await cluster.run("two")]
        for run in runs:
            await run.submit(*(f"{run.run_id}.{number}" for number in range(40)))
        worker = await cluster.worker("w1", slots=1)
        served: list[str] = []
        while len(set(served)) < 2 or served[-1] == served[0]:
            await wait_until(lambda: worker.assigned)
            ((name, assignment),) = worker.assigned.items()
            served.append(assignment.attempt.run_id)
            assert (await worker.add(name, 0, 1, STOP)).finished
            del worker.assigned[name]
            assert len(served) < 80


async def test_a_run_of_another_model_is_hinted_at(cluster: Any) -> None:
    await cluster.worker("w1")
    run = await cluster.run("other", model="elsewhere")
    (hint,) = await run.events("warning", 1)
    assert "elsewhere" in hint.message
    assert "attached: m" in hint.message


async def refuse(worker: Any, run_id: str, version: int, architecture: str) -> None:
    failed = fleet_pb2.InstallFailed(
        version=types_pb2.PolicyVersion(policy="policy", version=version), run_id=run_id, architecture=architecture
    )
    await worker.say(install_failed=failed)


def engine(model: str, architecture: str) -> fleet_pb2.EngineInfo:
    return fleet_pb2.EngineInfo(model=model, vocab_size=1000, max_model_len=256, architecture=architecture)


async def test_a_run_that_no_worker_has_the_model_for_fails_and_names_it(cluster: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("ebbtide.coordinator.fleet.worker_registry._INSTALL_PAUSE_S", 0.01)
    worker = await cluster.worker("w1", installs=False, engine=engine("small", "s"))
    run = await cluster.run(model="big")
    await run.submit("a")
    for tries in range(1, 4):
        await wait_until(lambda: len(worker.installed) >= tries)  # noqa: B023 - awaited at once
        assert (await run.get()).status == types_pb2.RUN_STATUS_RUNNING
        await refuse(worker, "r", 1, "b")
    ended = (await run.events("status", 3))[-1]
    assert ended.key == "FAILED"
    assert "names big, the workers serve small" in ended.message
    record = await run.get()
    assert (record.status, record.message) == (types_pb2.RUN_STATUS_FAILED, ended.message)
    assert dict(record.dropped) == {"run_ended": 1}


async def test_a_run_that_some_worker_fits_or_fitted_waits_for_it(cluster: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("ebbtide.coordinator.fleet.worker_registry._INSTALL_PAUSE_S", 0.01)
    run = await cluster.run(model="big")
    fit = await cluster.worker("w1", engine=engine("big", "b"))
    await run.submit("a")
    await fit.has("a")
    await fit.add("a", 0, 4)
    await fit.break_streams()
    await cluster.restart()  # which knows of the fit by the tokens that are stored
    misfit = await cluster.worker("w2", installs=False, engine=engine("small", "s"))
    for tries in range(1, 6):
        await wait_until(lambda: len(misfit.installed) >= tries)  # noqa: B023 - awaited at once
        await refuse(misfit, "r", 1, "b")
    back = await cluster.worker("w3", engine=engine("big", "b"))
    await back.has("a")
