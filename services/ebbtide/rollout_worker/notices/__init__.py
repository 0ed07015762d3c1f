"""Notices: the cloud says that this machine will be taken away. Asked of its metadata server, for as long as the worker
lives; what goes wrong on the way is logged, rarely, and is never the worker's end.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Final, Literal, NamedTuple, Protocol

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker.notices.metadata import MetadataServer
from ebbtide.rpc.backoff import pauses

log = telemetry.get_logger(__name__)

Cloud = Literal["aws", "gcp", "azure"]

#: Trouble of the same server is logged this often.
_LOG_EVERY_S: Final = 600.0


class Notice(NamedTuple):
    """This machine should be left within so many seconds. `reason` names the one event that says so."""

    within_s: float
    reason: str


class Probe(Protocol):
    """How one cloud is asked."""

    pause_s: float
    """Between two questions."""

    async def ask(self) -> Sequence[Notice]:
        """What is known now; may take its time where the cloud holds answers back. May raise anything."""
        ...


def make_probe(cloud: Cloud, server: MetadataServer) -> Probe:
    match cloud:
        case "aws":
            from ebbtide.rollout_worker.notices.aws import SpotProbe

            return SpotProbe(server)
        case "gcp":
            from ebbtide.rollout_worker.notices.gcp import PreemptionProbe

            return PreemptionProbe(server)
        case "azure":
            from ebbtide.rollout_worker.notices.azure import ScheduledEventsProbe

            return ScheduledEventsProbe(server)


async def watch(
    cloud: Cloud,
    url: str,
    told: Callable[[float, str], None],
    *,
    pauses: Callable[[float, float], Iterator[float]] = pauses,
) -> None:
    """Ask for ever; `told` gets seconds and reason of each notice, once. Raises `InvalidRequest` for no URL."""
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"{url!r} is no address: give http://HOST", field="metadata_url")
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(MetadataServer(url))
        probe = make_probe(cloud, server)
        known: set[str] = set()
        waits, logged = pauses(0.25, 4.0), float("-inf")
        while True:
            try:
                notices = await probe.ask()
            except Exception as error:  # noqa: BLE001 - whatever a metadata server does, the worker goes on
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
