"""Runs a worker whose scripted engine writes the time at which a token left it in place of the token's logprob.

    python -m benchmarks.token_latency.stamped_worker FLAGS OF A WORKER

Processes of one machine share the monotonic clock. A stamp is its remainder, so that a float32 keeps it to 15 us.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from ebbtide.rollout_worker import service
from ebbtide.rollout_worker.__main__ import main
from ebbtide.rollout_worker.engine import EngineRequest, TokenDelta
from ebbtide.rollout_worker.engine.scripted_engine import ScriptedEngine
from ebbtide.rollout_worker.settings import WorkerSettings

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


def _stamped(settings: WorkerSettings, borrowed: Any = None) -> StampedEngine:  # noqa: ARG001 - never borrowed
    return StampedEngine(settings.scripted)


if __name__ == "__main__":
    service.make_engine = _stamped
    main()
