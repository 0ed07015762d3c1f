"""An engine that cannot hear which texts have ended costs room in a cache, and says so."""

import asyncio
from types import SimpleNamespace
from typing import Any

from structlog.testing import capture_logs

from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine


async def test_an_engine_that_is_dead_when_it_is_told_of_ends_is_logged_once() -> None:
    async def dead(ids: list[str]) -> None:
        raise RuntimeError(f"no engine for {len(ids)} ids")

    engine: Any = VllmEngine.__new__(VllmEngine)  # a whole one has processes
    engine._llm, engine._telling = SimpleNamespace(engine_core=SimpleNamespace(abort_requests_async=dead)), set()
    with capture_logs() as logs:
        engine.forget(["a", "b"])
        (told,) = engine._telling
        await asyncio.wait([told])
        await asyncio.sleep(0)  # its callback runs
    assert not engine._telling
    assert [(line["log_level"], line["reason"]) for line in logs] == [("warning", "no engine for 2 ids")]
