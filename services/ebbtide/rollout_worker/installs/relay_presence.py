"""Keeps telling the relay what this worker holds, so that it sends others here and keeps what leads on from there.

Invariant: what is told is the version that the engine serves; and an address only while the mirror has all of it, so
that nobody is sent here for what others of the host have brought to another version. A relay that is away, or knows
nothing of it, is told again later. A pull tells of itself. Nothing survives the process: a relay forgets who is silent.
"""

import asyncio
from contextlib import suppress
from typing import Final

from ebbtide import telemetry
from ebbtide.errors import EbbtideError
from ebbtide.rollout_worker.installs.version_store import VersionStore
from ebbtide.transfer import Puller
from ebbtide.types.weights import Manifest

log = telemetry.get_logger(__name__)

#: When the relay did not answer, or named no time.
_AGAIN_S: Final = 5.0
#: A relay that demands to be told more often than this is not obeyed.
_LEAST_S: Final = 0.5


class RelayPresence:
    def __init__(self, puller: Puller, weights: VersionStore) -> None:
        self._puller, self._weights = puller, weights
        self._install_s = 0.0
        self._news = asyncio.Event()

    def installed(self, install_s: float) -> None:
        """Tell it at once: a version was installed, for which generation stood still so many seconds."""
        self._install_s = install_s
        self._news.set()

    def forget(self) -> None:
        """A run is over: what was fetched of it is served no more."""
        self._puller.forget()
        self._news.set()

    def again(self) -> None:
        """At once, for what is told of this worker has changed."""
        self._news.set()

    async def run(self) -> None:
        """For ever. Who does not run it is known as a holder only while it pulls."""
        while True:
            await self._news.wait()
            self._news.clear()
            manifest = self._weights.installed
            again_s = await self._once(manifest) if manifest else _AGAIN_S
            with suppress(TimeoutError):
                async with asyncio.timeout(max(again_s, _LEAST_S)):
                    await self._news.wait()
            self._news.set()

    async def _once(self, manifest: Manifest) -> float:
        """Tell it; seconds until it is to be told again."""
        run_id, version, kept = manifest.run_id, manifest.version, self._weights.keeps(manifest)
        try:
            return await self._puller.tell(run_id, version, kept=kept, install_s=self._install_s) or _AGAIN_S
        except EbbtideError as error:
            log.debug("the relay was not told", version=version.version, reason=str(error))
            return _AGAIN_S
