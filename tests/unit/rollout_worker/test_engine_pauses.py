"""An engine generates only while nothing pauses it, though vLLM resumes it whenever it wakes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.rollout_worker.engine import EngineFailed
from ebbtide.rollout_worker.engine.vllm.vllm_engine import CACHE, WEIGHTS, EnginePauses, VllmEngine
from ebbtide.rollout_worker.settings import VllmSettings


class Llm:
    """Pauses, sleeps and wakes as vLLM does."""

    def __init__(self) -> None:
        self.errored = False
        self.paused = False
        self.away: set[str] = set()
        self.fails = False
        self.refusals = 0

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        self.paused = True

    async def resume_generation(self) -> None:
        self.paused = False

    async def sleep(self, *, level: int, mode: str) -> None:
        assert level in (1, 2)
        assert mode == "keep"
        if self.fails:
            raise RuntimeError("out of memory")
        self.paused, self.away = True, {WEIGHTS, CACHE}

    async def release_kv_cache_memory(self) -> None:
        assert self.paused
        if self.refusals:
            self.refusals -= 1
            raise RuntimeError("requires a completed pause first")
        self.away = {CACHE}

    async def wake_up(self, tags: list[str] | None) -> None:
        if self.fails:
            raise RuntimeError("out of memory")
        self.away -= set(tags or (WEIGHTS, CACHE))
        self.paused = self.paused and bool(self.away)


async def test_an_engine_goes_on_when_the_last_reason_to_pause_is_gone() -> None:
    llm = Llm()
    pauses = EnginePauses(llm)
    await pauses.hold("one")
    await pauses.hold("other")
    await pauses.resume("one")
    assert llm.paused
    await pauses.resume("other")
    assert not llm.paused


async def test_an_engine_that_sleeps_does_not_go_on_for_another_reason() -> None:
    llm = Llm()
    pauses = EnginePauses(llm)
    await pauses.sleep("asleep", 1)
    await pauses.hold("other")
    await pauses.resume("other")
    assert llm.paused


async def test_an_engine_that_wakes_stays_paused_for_what_paused_it_meanwhile() -> None:
    llm = Llm()
    pauses = EnginePauses(llm)
    await pauses.sleep("asleep", 1)
    await pauses.hold("other")
    await pauses.wake()
    await pauses.resume("asleep")
    assert llm.paused
    assert not llm.away
    await pauses.resume("other")
    assert not llm.paused


async def test_weights_are_loaded_before_the_cache_returns_and_nothing_is_generated_between() -> None:
    llm = Llm()
    pauses = EnginePauses(llm)
    await pauses.sleep("asleep", 2)
    await pauses.wake(WEIGHTS)
    assert llm.away == {CACHE}
    assert llm.paused
    await pauses.wake(CACHE)
    assert llm.paused, "until the caller says that the weights are whole"
    await pauses.resume("asleep")
    assert not llm.paused


async def test_an_engine_whose_process_died_is_lost_when_it_is_to_pause() -> None:
    class Dead(Llm):
        async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
            self.errored = True
            raise RuntimeError("EngineCore encountered an issue")

    with pytest.raises(EngineFailed, match="process died"):
        await EnginePauses(Dead()).hold("install")


async def test_an_engine_that_cannot_move_its_memory_is_lost() -> None:
    llm = Llm()
    pauses = EnginePauses(llm)
    llm.fails = True
    with pytest.raises(EngineFailed, match="did not give its memory back: out of memory"):
        await pauses.sleep("asleep", 2)
    with pytest.raises(EngineFailed, match="did not get its memory back: out of memory"):
        await pauses.wake()


async def test_a_cache_goes_and_comes_back_alone_and_the_engine_stands_still_meanwhile() -> None:
    llm = Llm()
    pauses = EnginePauses(llm)
    llm.refusals = 2  # it still clears a request away
    await pauses.release_cache("cacheless")
    assert llm.away == {CACHE}
    await pauses.hold("other")
    await pauses.resume("other")
    assert llm.paused
    await pauses.wake(CACHE)
    assert (llm.paused, llm.away) == (True, set())
    await pauses.resume("cacheless")
    assert (llm.paused, llm.away) == (False, set())


async def test_an_engine_that_keeps_a_cache_it_was_to_give_up_is_lost() -> None:
    llm = Llm()
    llm.refusals = 1000
    with pytest.raises(EngineFailed, match="cache"):
        await EnginePauses(llm).release_cache("cacheless")


def on_gpu(tmp_path: Path, llm: Llm) -> VllmEngine:
    """A borrowed engine that sleeps by vLLM's sleep mode."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    borrowed: Any = SimpleNamespace(sleeps=True)
    engine = VllmEngine(str(tmp_path), 8, VllmSettings(), borrowed)
    engine._llm, engine._pauses = llm, EnginePauses(llm)
    return engine


async def test_an_engine_on_a_gpu_gives_its_cache_up_and_takes_it_again_at_most_once(tmp_path: Path) -> None:
    engine = on_gpu(tmp_path, llm := Llm())
    for _ in range(2):
        await engine.release_cache()
    assert (llm.paused, llm.away) == (True, {CACHE})
    for _ in range(2):
        await engine.take_cache()
    assert (llm.paused, llm.away) == (False, set())


async def test_an_engine_that_fell_asleep_without_its_cache_generates_as_soon_as_it_is_awake(tmp_path: Path) -> None:
    engine = on_gpu(tmp_path, llm := Llm())
    await engine.release_cache()
    await engine.give_up_cache()
    assert llm.away == {WEIGHTS, CACHE}
    await engine.take_cache()
    await engine.release_cache()
    assert llm.away == {WEIGHTS, CACHE}, "asleep there is no cache to take or to give"
    await engine.wake()
    assert (llm.paused, llm.away) == (False, set())
