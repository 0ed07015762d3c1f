"""How an engine is made a borrowed one, and what the scripted one does under a budget."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.grants import Page
from ebbtide.rollout_worker.engine import EngineRequest
from ebbtide.rollout_worker.engine.vllm.borrowed_engine import PAGE, BorrowedEngine
from ebbtide.rollout_worker.guard_link import family
from ebbtide.types.grants import Budget
from tests.fakes.scripted_engine import ScriptedEngine, follow
from tests.fakes.scripted_settings import ScriptedSettings
from tests.support.waiting import wait_until

EVER = 1e9
SETTINGS = ScriptedSettings(step_s=0.001)


@pytest.fixture
def page(tmp_path: Path) -> Page:
    """With a lease."""
    made = Page(tmp_path / "w1.page", create=True)
    made.renew(EVER)
    return made


@pytest.fixture
async def engine(page: Page) -> AsyncIterator[ScriptedEngine]:
    made = ScriptedEngine(SETTINGS, page)
    await made.start()
    yield made
    await made.stop()


class Asked:
    """Requests to an engine, and what came of each so far."""

    def __init__(self, engine: ScriptedEngine, count: int) -> None:
        self.got: list[list[int]] = [[] for _ in range(count)]
        self._tasks = [asyncio.create_task(self._ask(engine, number)) for number in range(count)]

    @property
    def made(self) -> int:
        return sum(map(len, self.got))

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask(self, engine: ScriptedEngine, number: int) -> None:
        wanted: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 4000, "min_tokens": 0}
        request = EngineRequest(request_id=f"r{number}", token_ids=[40 + number], stop_token_ids=(), **wanted)
        async for delta in engine.generate(request):
            self.got[number] += delta.ids


async def test_a_budget_for_some_goes_round_all(engine: ScriptedEngine, page: Page) -> None:
    asked = Asked(engine, 6)
    page.write_budget(Budget(2, 64, EVER))
    await wait_until(lambda: asked.made >= 120)
    page.write_budget(Budget())
    lengths = [len(ids) for ids in asked.got]
    assert max(lengths) - min(lengths) <= 2
    steps = page.steps()
    assert steps.scheduled <= 2 * (steps.steps + 1)
    await asked.end()


@pytest.mark.parametrize("budget", [Budget(3, 64, EVER), Budget(64, 3, EVER)])
async def test_no_step_has_more_than_its_budget(engine: ScriptedEngine, page: Page, budget: Budget) -> None:
    asked = Asked(engine, 8)
    page.write_budget(budget)
    await wait_until(lambda: page.steps().steps >= 20)
    steps = page.steps()
    assert steps.scheduled == 3 * steps.steps
    await asked.end()


async def test_tokens_are_the_same_however_often_an_engine_was_stopped(engine: ScriptedEngine, page: Page) -> None:
    asked = Asked(engine, 1)
    for _ in range(10):
        made = asked.made
        page.write_budget(Budget(8, 8, EVER))
        await wait_until(lambda made=made: asked.made > made)  # type: ignore[misc]
        page.write_budget(Budget())
        await wait_until(lambda: not page.steps().stepping)
    await asked.end()
    assert asked.got[0] == [token for token, _ in follow(SETTINGS, [40], asked.made)]


async def test_a_paused_engine_makes_nothing_whatever_it_is_granted(engine: ScriptedEngine, page: Page) -> None:
    asked = Asked(engine, 1)
    page.write_budget(Budget(8, 8, EVER))
    await wait_until(lambda: asked.made > 5)
    await engine.pause("test")
    await wait_until(lambda: not page.steps().stepping)
    steps = page.steps().steps
    assert page.await_budget(0.01).tokens
    assert page.steps().steps == steps
    await engine.resume("test")
    await wait_until(lambda: page.steps().steps > steps)
    await asked.end()


def arguments(tmp_path: Path, step_tokens: int = 64, **given: Any) -> dict[str, Any]:
    return BorrowedEngine(tmp_path / "w1.page", step_tokens).arguments({"max_num_seqs": 32, "model": "m", **given})


def test_a_borrowed_engine_takes_one_small_step_at_a_time(tmp_path: Path) -> None:
    found = arguments(tmp_path)
    assert found["max_num_batched_tokens"] == 64
    assert found["async_scheduling"] is False
    assert found["scheduler_cls"].endswith("BudgetedScheduler")
    assert found["model"] == "m"


@pytest.mark.parametrize("name", ["scheduler_cls", "async_scheduling", "max_num_batched_tokens"])
def test_what_makes_an_engine_a_borrowed_one_cannot_be_set_otherwise(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as refused:
        arguments(tmp_path, **{name: 1})
    assert refused.value.field == "vllm.engine_args"


@pytest.mark.parametrize(
    "given",
    [
        {"pipeline_parallel_size": 2},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        {"kv_offloading_size": 4.0},
        {"enable_dbo": True},
    ],
)
def test_what_a_budget_cannot_hold_is_refused_by_name(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"{next(iter(given))} is not for a borrowed engine") as refused:
        arguments(tmp_path, **given)
    assert refused.value.field == "vllm.engine_args"


def test_what_is_said_as_vllm_has_it_anyway_is_no_reason_to_refuse(tmp_path: Path) -> None:
    assert arguments(tmp_path, pipeline_parallel_size=1, kv_transfer_config=None)["pipeline_parallel_size"] == 1


def test_a_step_has_room_for_a_token_of_each_slot(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="slots, 32") as refused:
        arguments(tmp_path, step_tokens=31)
    assert refused.value.field == "step_tokens"


def test_processes_of_the_engine_find_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PAGE, "OMP_WAIT_POLICY", "KMP_BLOCKTIME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    made = BorrowedEngine(tmp_path / "w1.page", 64)
    made.set_environment()
    assert Page(Path(os.environ[PAGE])).budget() == Budget()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_the_budget_of_a_warm_up_ends_with_it(tmp_path: Path) -> None:
    made = BorrowedEngine(tmp_path / "w1.page", 64)
    with made.warming_up():
        assert made.page.budget().tokens == 64
    assert made.page.budget() == Budget()
    assert made.page.offered() == Budget()


async def test_a_family_is_a_process_and_all_below_it_and_this_one_is_alone() -> None:
    assert list(family(os.getpid())) == [os.getpid()]
    shell = await asyncio.create_subprocess_exec("sh", "-c", "sleep 60 & wait")
    try:
        found = await wait_until(lambda: pids if len(pids := list(family(shell.pid))) == 2 else None)
        assert found is not None
        assert found[0] == shell.pid
    finally:
        for pid in list(family(shell.pid)):  # the shell first: without its child it would end by itself
            os.kill(pid, 9)
        await shell.wait()
