"""Watches the cloud's metadata server for notices that it will take this machine away.

The watch lasts as long as the worker. Its failures are logged, rarely, and never end the worker.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Final, Literal, Protocol

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker.notices.aws import SpotProbe
from ebbtide.rollout_worker.notices.azure import ScheduledEventsProbe
from ebbtide.rollout_worker.notices.gcp import PreemptionProbe
from ebbtide.rollout_worker.notices.metadata import MetadataServer, Notice
from ebbtide.rpc.backoff import pauses

log = telemetry.get_logger(__name__)

Cloud = Literal["aws", "gcp", "azure"]

#: Interval of log lines about a failing server.
_LOG_EVERY_S: Final = 600.0


class Probe(Protocol):
    """Asks one cloud."""

    #: Between two questions.
    pause_s: float

    async def ask(self) -> Sequence[Notice]:
        """The current notices; may take long where the cloud holds answers back. May raise anything."""
        ...


PROBES: Final[Mapping[Cloud, Callable[[MetadataServer], Probe]]] = {
    "aws": SpotProbe,
    "gcp": PreemptionProbe,
    "azure": ScheduledEventsProbe,
}


async def watch(
    cloud: Cloud,
    url: str,
    told: Callable[[float, str], None],
    *,
    pauses: Callable[[float, float], Iterator[float]] = pauses,
) -> None:
    """Ask forever; `told` gets seconds and reason of each notice, once. Raises `InvalidRequest` for a wrong URL."""
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"{url!r} is no address: give http://HOST", field="metadata_url")
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(MetadataServer(url))
        probe = PROBES[cloud](server)
        known: set[str] = set()
        waits, logged = pauses(0.25, 4.0), float("-inf")
        while True:
            try:
                notices = await probe.ask()
            except Exception as error:  # noqa: BLE001 - no answer of a metadata server may end the worker
                if time.monotonic() - logged > _LOG_EVERY_S:
                    logged = time.monotonic()
                    log.warning("no notices to be had", cloud=cloud, url=url, reason=f"{type(error).__name__}: {error}")
                await asyncio.sleep(next(waits))
                continue
            waits = pauses(0.25, 4.0)
            for notice in notices:
                if notice.reason not in known:
                    known.add(notice.reason)
                    log.warning("notice", reason=notice.reason, within_s=round(notice.within_s, 1))
                    told(notice.within_s, notice.reason)
            await asyncio.sleep(probe.pause_s)
