"""Which run a request belongs to, and when leases are opened and released."""

import asyncio

import msgspec
import pytest

from ebbtide.errors import InvalidRequest, NotFound, Unavailable
from ebbtide.gateway.access import ClientKey
from ebbtide.gateway.runs import RunDirectory
from ebbtide.gateway.templates import TemplateSandbox
from ebbtide.types.run import RunStatus
from tests.fakes.clocks import SetClock
from tests.fakes.scripted_app_state import scripted_directory
from tests.fakes.scripted_rollouts import ScriptedCatalog, ScriptedSource, scripted_model, scripted_run
from tests.support.waiting import wait_until

ANY = ClientKey(owner="team", sessions_of="team")


@pytest.fixture
def catalog(sandbox: TemplateSandbox) -> ScriptedCatalog:
    model = scripted_model(sandbox)
    runs = [scripted_run("a-1", name="a"), scripted_run("b-1", name="b"), scripted_run("b-2", name="b")]
    return ScriptedCatalog([ScriptedSource(run, model) for run in runs])


@pytest.fixture
def clock() -> SetClock:
    return SetClock(100.0)


@pytest.fixture
def directory(catalog: ScriptedCatalog, clock: SetClock) -> RunDirectory:
    return scripted_directory(catalog, idle_s=60, clock=clock)


async def found(directory: RunDirectory, model: str, key: ClientKey = ANY) -> str:
    return (await directory.find(key, model)).run.run_id


async def test_a_run_is_found_by_its_id_or_its_only_name(directory: RunDirectory) -> None:
    assert await found(directory, "b-2") == "b-2"
    assert await found(directory, "a") == "a-1"
    with pytest.raises(InvalidRequest, match="2 live runs are named b"):
        await directory.find(ANY, "b")
    with pytest.raises(InvalidRequest, match="model: 3 live runs are there; give a run's id"):
        await directory.find(ANY, "")
    with pytest.raises(NotFound, match="no live run has the id or name 'c'"):
        await directory.find(ANY, "c")


async def test_a_key_of_one_run_decides_alone(directory: RunDirectory) -> None:
    key = ClientKey(owner="team", sessions_of="team", run_id="b-1")
    assert await found(directory, "gpt-of-somebody", key) == "b-1"
    assert [run.run_id for run in await directory.visible(key)] == ["b-1"]
    with pytest.raises(NotFound, match="the key's run z-1 is not there"):
        await directory.find(ClientKey(owner="team", sessions_of="team", run_id="z-1"), "a")


async def test_ended_runs_are_not_served(directory: RunDirectory, catalog: ScriptedCatalog, clock: SetClock) -> None:
    assert await found(directory, "b-1") == "b-1"
    source = catalog.sources["b-1"]
    source.run = msgspec.structs.replace(source.run, status=RunStatus.FINISHED)
    clock.now += 5
    await directory.refresh()
    await wait_until(lambda: source.released)
    assert await found(directory, "b") == "b-2"
    assert [run.run_id for run in await directory.visible(ANY)] == ["a-1", "b-2"]


async def test_a_run_submitted_just_now_is_looked_up(
    directory: RunDirectory, catalog: ScriptedCatalog, clock: SetClock, sandbox: TemplateSandbox
) -> None:
    assert await found(directory, "a") == "a-1"
    catalog.sources["c-1"] = ScriptedSource(scripted_run("c-1", name="c"), scripted_model(sandbox))
    clock.now += 0.499  # the list is young, and older than the run
    assert await found(directory, "c") == "c-1"


async def test_a_run_submitted_just_now_is_listed(
    directory: RunDirectory, catalog: ScriptedCatalog, clock: SetClock, sandbox: TemplateSandbox
) -> None:
    await directory.refresh()
    catalog.sources["c-1"] = ScriptedSource(scripted_run("c-1", name="c"), scripted_model(sandbox))
    clock.now += 0.499
    lists = await asyncio.gather(*(directory.visible(ANY) for _ in range(5)))
    assert all("c-1" in [run.run_id for run in runs] for runs in lists)
    assert catalog.reads == 2, "those who ask at once share a read"


async def test_refreshes_at_once_release_each_lease_once_and_wait_for_none(
    directory: RunDirectory, catalog: ScriptedCatalog, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, released = asyncio.Event(), list[str]()

    async def release(source: ScriptedSource) -> None:
        released.append(source.run.run_id)
        await goes_on.wait()

    monkeypatch.setattr(ScriptedSource, "release", release)
    for name in ("a-1", "b-1", "b-2"):
        await directory.find(ANY, name)
    clock.now += 61
    async with asyncio.timeout(20):
        await asyncio.gather(*(directory.refresh() for _ in range(3)))
        assert await found(directory, "a") == "a-1", "opened again meanwhile"
        await directory.refresh()
        await wait_until(lambda: len(released) == 3)
        assert await found(directory, "a") == "a-1"
    assert (sorted(released), catalog.opened.count("a-1")) == (["a-1", "b-1", "b-2"], 2)
    goes_on.set()
    await directory.close()


async def test_those_who_ask_for_unknown_runs_at_once_share_a_read_and_wait_for_it(
    directory: RunDirectory, catalog: ScriptedCatalog, clock: SetClock
) -> None:
    await directory.refresh()
    clock.now += 0.499
    answers = await asyncio.gather(*(directory.find(ANY, "c") for _ in range(5)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [NotFound] * 5
    assert catalog.reads == 2


async def test_those_who_ask_for_unknown_runs_hear_together_that_the_coordinator_is_away(
    directory: RunDirectory, catalog: ScriptedCatalog, clock: SetClock
) -> None:
    await directory.refresh()
    catalog.away = Unavailable("away")
    clock.now += 1
    answers = await asyncio.gather(*(directory.find(ANY, "c") for _ in range(5)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [Unavailable] * 5
    assert catalog.reads == 2, "a read waits for a coordinator; nobody waits for several"


async def test_a_directory_closes_while_somebody_asks_for_an_unknown_run(
    directory: RunDirectory, catalog: ScriptedCatalog
) -> None:
    catalog.held = asyncio.Event()
    asking = asyncio.create_task(directory.find(ANY, "c"))
    await wait_until(lambda: catalog.reads)
    await directory.close()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_read_that_began_earlier_does_not_hide_a_run(
    directory: RunDirectory, catalog: ScriptedCatalog, clock: SetClock, sandbox: TemplateSandbox
) -> None:
    answers = catalog.held = asyncio.Event()
    slow = asyncio.create_task(directory.refresh())
    await wait_until(lambda: catalog.reads == 1)
    clock.now += 1
    catalog.sources["c-1"] = ScriptedSource(scripted_run("c-1", name="c"), scripted_model(sandbox))
    assert await found(directory, "c") == "c-1"
    answers.set()
    await slow
    assert "c-1" in [run.run_id for run in await directory.visible(ANY)]
    assert catalog.reads == 2


async def test_one_lease_serves_all_who_ask_at_once(directory: RunDirectory, catalog: ScriptedCatalog) -> None:
    await asyncio.gather(*(directory.find(ANY, "a") for _ in range(5)))
    assert catalog.opened == ["a-1"]


async def test_a_lost_lease_is_claimed_again(directory: RunDirectory, catalog: ScriptedCatalog) -> None:
    await directory.find(ANY, "a")
    catalog.sources["a-1"].lost.set()
    await directory.find(ANY, "a")
    assert catalog.opened == ["a-1", "a-1"]


async def test_an_idle_run_is_released_and_opened_again(
    directory: RunDirectory, catalog: ScriptedCatalog, clock: SetClock
) -> None:
    await directory.find(ANY, "a")
    clock.now += 61
    await directory.refresh()
    await wait_until(lambda: catalog.sources["a-1"].released)
    await directory.find(ANY, "a")
    assert catalog.opened == ["a-1", "a-1"]


async def test_while_the_coordinator_is_away_known_runs_are_served(
    directory: RunDirectory, catalog: ScriptedCatalog, clock: SetClock
) -> None:
    await directory.find(ANY, "a")
    catalog.away = Unavailable("away")
    clock.now += 30
    assert await found(directory, "a") == "a-1"
    with pytest.raises(Unavailable):
        await directory.find(ANY, "c")
