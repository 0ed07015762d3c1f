"""Claiming runs: what ends a run, what ends the process, and what is tried again."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ebbtide import run_client
from ebbtide.errors import InvalidRequest, LeaseSuperseded, Unavailable
from ebbtide.run_client import RunFailed
from ebbtide.run_settings import WorkSettings
from ebbtide.runtime import ProcessSettings, Shutdown, race
from ebbtide.types.run import EnvironmentSpec, RunSpec, RunStatus
from tests.support.waiting import wait_until

SPEC = RunSpec(name="run", model="model", environment=EnvironmentSpec(name="none"))


class Runs:
    """A client whose claims give a new run each time; `works` are what is done with them, one after another."""

    def __init__(self, make_cluster: Any, works: list[Callable[[Any], Awaitable[None]]]) -> None:
        self.make_cluster = make_cluster
        self.works = works
        self.clusters: list[Any] = []

    async def __aenter__(self) -> "Runs":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    @asynccontextmanager
    async def claim(self, run_id: str | None, role: str, *, holder: str) -> AsyncIterator[Any]:
        if len(self.clusters) == len(self.works):
            await asyncio.Event().wait()  # no run wants this role
        self.clusters.append(self.make_cluster(SPEC, lambda request: None, run_id=f"run-{len(self.clusters)}"))
        yield self.clusters[-1].lease(role)

    async def work(self, client: Any, lease: Any) -> None:
        await self.works[len(self.clusters) - 1](lease)


@pytest.fixture
def serve(make_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Awaitable[Runs]]:
    async def serve(works: list[Any], *, stop: Callable[[Runs], bool] | None = None, **settings: Any) -> Runs:
        runs = Runs(make_cluster, works)
        monkeypatch.setattr(run_client, "Client", lambda *args, **kwargs: runs)
        monkeypatch.setattr(run_client, "_PAUSE_S", 0.01)
        shutdown = Shutdown("driver", ProcessSettings())

        async def end() -> None:
            if stop is not None:
                await wait_until(lambda: stop(runs))
                shutdown.requested.set()
            await asyncio.Event().wait()

        async with asyncio.timeout(5):
            await race(run_client.serve(WorkSettings(**settings), shutdown, "driver", runs.work), end())
        return runs

    return serve


async def finish(lease: Any) -> None:
    await lease.finish()


def failing(error: Exception) -> Callable[[Any], Coroutine[Any, Any, None]]:
    async def fail(lease: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("settings", [{"once": True}, {"run_id": "run-0"}])
async def test_once_and_a_run_id_end_the_process_with_its_run(serve: Any, settings: dict[str, Any]) -> None:
    runs = await serve([finish, finish], **settings)
    assert len(runs.clusters) == 1


async def test_without_them_the_next_run_is_claimed_until_told_to_end(serve: Any) -> None:
    runs = await serve([finish, finish, finish], stop=lambda runs: len(runs.clusters) == 3)
    assert [cluster.run.status for cluster in runs.clusters][:2] == [RunStatus.FINISHED] * 2


@pytest.mark.parametrize("error", [InvalidRequest("no such", field="model"), RunFailed("every episode failed")])
async def test_a_run_at_fault_is_failed_with_the_message(serve: Any, error: Exception) -> None:
    runs = await serve([failing(error)], once=True)
    assert runs.clusters[0].run.status is RunStatus.FAILED
    assert runs.clusters[0].run.message == str(error)


async def test_a_service_that_is_away_interrupts_and_the_run_is_taken_up_again(serve: Any) -> None:
    runs = await serve([failing(Unavailable("weight-relay at 127.0.0.1:1 cannot be reached")), finish], once=True)
    assert len(runs.clusters) == 2
    (warning,) = runs.clusters[0].named("warning")
    assert "weight-relay" in warning.message


async def test_a_superseded_holder_steps_down(serve: Any) -> None:
    runs = await serve([failing(LeaseSuperseded("claimed by another"))], once=True)
    assert runs.clusters[0].run.status is RunStatus.RUNNING


async def test_work_ends_when_its_lease_is_lost(serve: Any) -> None:
    async def lose(lease: Any) -> None:
        lease.lost.set()
        await asyncio.Event().wait()

    assert len((await serve([lose], once=True)).clusters) == 1


async def test_other_errors_end_the_process(serve: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        await serve([failing(ZeroDivisionError())])
