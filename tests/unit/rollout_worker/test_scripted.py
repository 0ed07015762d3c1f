"""The scripted engine keeps to its script and to its speed, in virtual time."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.rollout_worker.engine import EngineFailed, EngineRequest
from ebbtide.types.rollout import FinishReason
from tests.fakes import scripted_engine
from tests.fakes.instant_loop import InstantLoop
from tests.fakes.scripted_engine import END, ScriptedEngine, follow
from tests.fakes.scripted_settings import ScriptedSettings

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture
def virtually(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a coroutine in virtual time."""

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        loop = InstantLoop()
        monkeypatch.setattr(scripted_engine, "time", SimpleNamespace(monotonic=loop.time))
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(work)

    return run


def request(name: str, *, prompt: int = 8, **bounds: Any) -> EngineRequest:
    wanted = {"max_tokens": 100, "min_tokens": 0, "stop_token_ids": (), **bounds}
    return EngineRequest(
        request_id=name, token_ids=list(range(2, 2 + prompt)), temperature=1.0, top_p=1.0, top_k=0, **wanted
    )


async def collect(engine: ScriptedEngine, wanted: EngineRequest) -> tuple[list[int], list[float], Any]:
    """The tokens of a request, the moment of each, and how it ended."""
    ids: list[int] = []
    times: list[float] = []
    finish = None
    async for delta in engine.generate(wanted):
        ids += delta.ids
        times += [asyncio.get_running_loop().time()] * len(delta.ids)
        finish = delta.finish
    return ids, times, finish


async def all_of(settings: ScriptedSettings, count: int, **wanted: Any) -> list[tuple[list[int], list[float], Any]]:
    engine = ScriptedEngine(settings)
    await engine.start()
    return await asyncio.gather(*(collect(engine, request(f"r{one}", **wanted)) for one in range(count)))


def test_a_request_gets_the_tokens_of_its_script(virtually: Run) -> None:
    settings = ScriptedSettings(step_s=0.5, mean_length=30)
    ((ids, times, finish),) = virtually(all_of(settings, 1, stop_token_ids=(END,)))
    script = [token for token, _ in follow(settings, list(range(2, 10)), 100)]
    length = script.index(END) + 1 if END in script else 100
    assert ids == script[:length]
    assert finish is (FinishReason.STOP if END in script else FinishReason.LENGTH)
    assert times[-1] == pytest.approx(0.5 * length)


def test_up_to_the_plateau_each_rollout_is_as_fast_as_one(virtually: Run) -> None:
    for count in (1, 8):
        for _, times, _ in virtually(all_of(ScriptedSettings(step_s=0.1, plateau=8), count)):
            assert times[-1] == pytest.approx(10.0)


def test_beyond_the_plateau_the_total_stays_flat(virtually: Run) -> None:
    for _, times, _ in virtually(all_of(ScriptedSettings(step_s=0.1, plateau=8), 32)):
        assert times[-1] == pytest.approx(40.0)


def test_a_slow_engine_is_slower_in_everything(virtually: Run) -> None:
    settings: dict[str, Any] = {"step_s": 0.1, "first_token_s": 1.0, "prefill_token_s": 0.01}
    ends = [virtually(all_of(ScriptedSettings(slowness=slow, **settings), 1))[0][1][-1] for slow in (1.0, 10.0)]
    assert ends == pytest.approx([1.0 + 10.0 + 0.08, 110.8])


def test_reading_a_prompt_holds_everybody_up_once(virtually: Run) -> None:
    async def joined() -> list[float]:
        engine = ScriptedEngine(ScriptedSettings(step_s=0.1, prefill_token_s=0.01))
        await engine.start()
        first = asyncio.create_task(collect(engine, request("r1", max_tokens=60)))
        await asyncio.sleep(2.01)
        await collect(engine, request("r2", prompt=100, max_tokens=10))
        _, times, _ = await first
        return times

    times = virtually(joined())
    steps = [late - early for early, late in itertools.pairwise(times)]
    assert max(steps) == pytest.approx(1.1), "its own step and 100 tokens read"
    assert sorted(steps)[-2] == pytest.approx(0.1)


def test_tokens_may_come_in_bursts_at_the_same_speed(virtually: Run) -> None:
    ((ids, times, _),) = virtually(all_of(ScriptedSettings(step_s=0.1, burst=8), 1))
    assert len(ids) == 100
    assert times[7] == pytest.approx(0.8)
    assert len(set(times)) == 13


def test_a_stall_begins_at_its_moment_and_ends(virtually: Run) -> None:
    settings = ScriptedSettings(step_s=0.1, stall_at_s=3.0, stall_s=20.0)
    for _, times, _ in virtually(all_of(settings, 3)):
        gaps = [(late - early, early) for early, late in itertools.pairwise(times)]
        gap, since = max(gaps)
        assert 20.0 <= gap <= 20.2
        assert 2.8 <= since <= 3.0
        assert len(times) == 100


def test_a_stall_without_end_lasts(virtually: Run) -> None:
    async def stalled() -> list[int]:
        engine = ScriptedEngine(ScriptedSettings(step_s=0.1, stall_at_s=3.0))
        await engine.start()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100_000):
                await collect(engine, request("r1"))
        await engine.stop()
        return [engine.tokens]

    assert virtually(stalled())[0] in {29, 30}


def test_a_lost_engine_gives_out_what_it_made_and_then_fails_everybody(virtually: Run) -> None:
    async def lost() -> tuple[int, list[BaseException | Any]]:
        engine = ScriptedEngine(ScriptedSettings(step_s=0.1, fail_after_tokens=25))
        await engine.start()
        made = [0] * 3

        async def read(number: int) -> None:
            async for delta in engine.generate(request(f"r{number}")):
                made[number] += len(delta.ids)

        ends = await asyncio.gather(*map(read, range(3)), return_exceptions=True)
        return sum(made), ends

    made, ends = virtually(lost())
    assert made == 25
    assert all(isinstance(end, EngineFailed) for end in ends)


def test_nothing_is_made_while_the_engine_is_paused(virtually: Run) -> None:
    async def paused() -> list[int]:
        engine = ScriptedEngine(ScriptedSettings(step_s=0.1))
        await engine.start()
        reader = asyncio.create_task(collect(engine, request("r1")))
        await asyncio.sleep(1.05)
        for reason in ("store", "drain"):
            await engine.pause(reason)
        seen = [engine.tokens]
        await asyncio.sleep(5.0)
        await engine.resume("store")
        await asyncio.sleep(5.0)
        seen.append(engine.tokens)
        await engine.resume("drain")
        await reader
        return [*seen, engine.tokens]

    assert virtually(paused()) == [10, 10, 100]


def test_a_request_that_is_closed_gets_nothing_more(virtually: Run) -> None:
    async def closed() -> int:
        engine = ScriptedEngine(ScriptedSettings(step_s=0.1))
        await engine.start()
        stream = engine.generate(request("r1"))
        await anext(stream)
        await stream.aclose()
        await asyncio.sleep(5.0)
        return engine.tokens

    assert virtually(closed()) == 1


def test_one_timer_serves_all_requests(virtually: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps = []
    sleep = asyncio.sleep

    async def counted(delay: float) -> None:
        sleeps.append(delay)
        await sleep(delay)

    monkeypatch.setattr("asyncio.sleep", counted)
    virtually(all_of(ScriptedSettings(step_s=0.1), 64))
    assert len(sleeps) <= 102
