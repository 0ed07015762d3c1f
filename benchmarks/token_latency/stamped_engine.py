"""Is the scripted engine, which writes the time at which a token left it in place of the token's logprob.

Processes of one machine share the monotonic clock. A stamp is its remainder, so that a float32 keeps it to 15 us.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Final

from ebbtide.grants import Page
from ebbtide.rollout_worker.engine import EngineRequest, TokenDelta
from ebbtide.rollout_worker.settings import WorkerSettings
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.scripted_settings import read_script

#: After so many seconds stamps begin again at 0.
WRAP_S: Final = 256.0


def age_s(logprob: float, now: float) -> float:
    """Seconds since a token was stamped."""
    return (now + logprob) % WRAP_S


class StampedEngine(ScriptedEngine):
    """Logprobs are negative, and so are the stamps."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        async with aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                yield delta._replace(logprobs=[-(time.monotonic() % WRAP_S)] * len(delta.ids))


def make(settings: WorkerSettings, model: Path | None, page: Page | None) -> StampedEngine:  # noqa: ARG001 - no other
    """The factory by which a worker has it."""
    return StampedEngine(read_script(settings.engine_options), page)
