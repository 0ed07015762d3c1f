"""An engine generates only while nothing pauses it, though vLLM resumes it whenever it wakes."""

import pytest

from ebbtide.rollout_worker.engine import EngineFailed
from ebbtide.rollout_worker.engine.vllm.vllm_engine import CACHE, WEIGHTS, EnginePauses


class Llm:
    """Pauses, sleeps and wakes as vLLM does."""

    def __init__(self) -> None:
        self.errored = False
        self.paused = False
        self.away: set[str] = set()
        self.fails = False

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
