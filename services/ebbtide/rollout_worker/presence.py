"""Keeps telling the relay what this worker holds, so that it sends others here and keeps what leads on from there.

Invariant: what is told is the version that the engine serves; a relay that is away, or knows nothing of it, is told
again later. A pull tells of itself. Nothing survives the process: a relay forgets who is silent.
"""

import asyncio
from contextlib import suppress
from typing import Final, NamedTuple

from ebbtide import telemetry
from ebbtide.errors import EbbtideError
from ebbtide.transfer import Puller
from ebbtide.types.weights import PolicyVersion

log = telemetry.get_logger(__name__)

#: When the relay did not answer, or named no time.
_AGAIN_S: Final = 5.0
#: A relay that demands to be told more often than this is not obeyed.
_LEAST_S: Final = 0.5


class Held(NamedTuple):
    """`whole`: not only an engine's slices of it. `install_s`: seconds for which generation stood still for it."""

    run_id: str
    version: PolicyVersion
    whole: bool
    install_s: float


class Presence:
    def __init__(self, puller: Puller) -> None:
        self._puller = puller
        self._held: Held | None = None
        self._news = asyncio.Event()

    def tell(self, held: Held) -> None:
        """From now on, and at once."""
        self._held = held
        self._news.set()

    def again(self) -> None:
        """At once, for what is told of this worker has changed."""
        self._news.set()

    async def run(self) -> None:
        """For ever. Who does not run it is known as a holder only while it pulls."""
        while True:
            await self._news.wait()
            self._news.clear()
            again_s = await self._once(self._held) if self._held else _AGAIN_S
            with suppress(TimeoutError):
                async with asyncio.timeout(max(again_s, _LEAST_S)):
                    await self._news.wait()
            self._news.set()

    async def _once(self, held: Held) -> float:
        """Tell it; seconds until it is to be told again."""
        run_id, version, whole, install_s = held
        try:
            return await self._puller.tell(run_id, version, done=whole, install_s=install_s) or _AGAIN_S
        except EbbtideError as error:
            log.debug("the relay was not told", version=version.version, reason=str(error))
            return _AGAIN_S
