"""Watches the cloud's metadata server for notices that it will take this machine away.

The watch lasts as long as the worker. Its failures are logged, rarely, and never end the worker.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Annotated, Final, Literal, NamedTuple, Protocol, Self

import aiohttp
import msgspec
from msgspec import Meta, Struct

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest, Unavailable
from ebbtide.rpc.backoff import pauses

log = telemetry.get_logger(__name__)

Cloud = Literal["aws", "gcp", "azure"]

#: Interval of log lines about a failing server.
_LOG_EVERY_S: Final = 600.0
#: Longest answer, bytes; valid ones are far shorter.
_LIMIT: Final = 64 << 10
#: A link-local address connects at once or never.
_CONNECT_S: Final = 2.0
#: Answers come at once too, unless the server holds them back on purpose.
ANSWER_S = 3.0
#: Reserved of a notice's time: the machine may end early.
MARGIN_S: Final = 5.0
#: The least time that a notice gives; one in the past may just be late.
_LEAST_S: Final = 2.0


class Notice(NamedTuple):
    """The worker should leave this machine within so many seconds."""

    within_s: float
    reason: str  # names the one event


class Probe(Protocol):
    """Asks one cloud."""

    #: Between two questions.
    pause_s: float

    async def ask(self) -> Sequence[Notice]:
        """The current notices; may take long where the cloud holds answers back. May raise anything."""
        ...


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


class MetadataAnswer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    def expect(self, *statuses: int) -> "MetadataAnswer":
        """Itself. Raises `Unavailable` for any other status."""
        if self.status not in statuses:
            raise Unavailable(f"the metadata server answered {self.status}")
        return self

    def seconds_until(self, when: datetime | None, *, standard_s: float) -> float:
        """From this answer to `when`, less a margin, by the server's clock: this machine's may be wrong. If the server
        tells no time, the cloud's standard notice."""
        now = parse_date(self.headers.get("Date", ""))
        left_s = (when - now) / timedelta(seconds=1) if when and now else standard_s
        return max(_LEAST_S, left_s - MARGIN_S)


def parse_date(text: str) -> datetime | None:
    """A date as in HTTP or RFC 3339; None if it is neither, or lacks its zone."""
    for parse in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            found = parse(text)
        except (ValueError, TypeError):
            continue
        if found.tzinfo is not None:
            return found
    return None


class MetadataServer:
    """A connection to the server, as an async context manager: no proxy, no redirect, no cookie, no long answer."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(trust_env=False, cookie_jar=aiohttp.DummyCookieJar())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str], *, timeout_s: float = 0.0
    ) -> MetadataAnswer:
        """Ask once, for `ANSWER_S` or longer. Raises `Unavailable`, `TimeoutError`, `aiohttp.ClientError`."""
        if self._session is None:
            raise Unavailable("the metadata server is asked outside its context: use `async with`")
        timeout = aiohttp.ClientTimeout(total=timeout_s or ANSWER_S, sock_connect=_CONNECT_S)
        async with self._session.request(
            method, self._url + path, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            body = b""
            async for chunk in response.content.iter_chunked(4096):
                body += chunk
                if len(body) > _LIMIT:
                    raise Unavailable(f"the metadata server answers with more than {_LIMIT} bytes")
            return MetadataAnswer(response.status, response.headers, body)


_AWS_TOKEN_TTL_S: Final = 21600
_AWS_NOTICE_S: Final = 120.0


class InstanceAction(Struct, frozen=True):
    """The end of the machine."""

    action: Annotated[str, Meta(max_length=64)]  # terminate, stop or hibernate: the machine is gone after each
    time: Annotated[str, Meta(max_length=64)] = ""  # RFC 3339


class SpotProbe:
    """AWS, about spot instances: `spot/instance-action` appears, as a rule two minutes before the end.

    By IMDSv2, each question carries a token, which the server issues and which expires.
    """

    pause_s = 2.0

    def __init__(self, server: MetadataServer) -> None:
        self._server = server
        self._token, self._renew_at = "", 0.0

    async def ask(self) -> Sequence[Notice]:
        answer = await self._ask()
        if answer.status == 401:  # the server forgot the token: try one other
            self._token = ""
            answer = await self._ask()
        if answer.expect(200, 404).status == 404:
            return []
        found = msgspec.json.decode(answer.body, type=InstanceAction)
        within_s = answer.seconds_until(parse_date(found.time), standard_s=_AWS_NOTICE_S)
        return [Notice(within_s, f"aws: {found.action} at {found.time or 'any moment'}")]

    async def _ask(self) -> MetadataAnswer:
        if not self._token or time.monotonic() > self._renew_at:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_AWS_TOKEN_TTL_S)}
            answer = await self._server.ask("PUT", "/latest/api/token", headers)
            self._token = answer.expect(200).body.decode("ascii")
            self._renew_at = time.monotonic() + _AWS_TOKEN_TTL_S / 2
        headers = {"X-aws-ec2-metadata-token": self._token}
        return await self._server.ask("GET", "/latest/meta-data/spot/instance-action", headers)


_GCP_HEADERS: Final = {"Metadata-Flavor": "Google"}
_GCP_PATH: Final = "/computeMetadata/v1/instance/preempted"
#: The server answers after this time even without a change; the probe waits a little longer.
_GCP_HANG_S: Final = 60
_GCP_NOTICE_S: Final = 30.0


class PreemptionProbe:
    """Google Cloud, about preemptible and spot machines: `instance/preempted` turns TRUE 30 s before the end.

    The server answers when the value changes; the question's ETag names the value seen last.
    """

    #: For servers that answer at once. A change meanwhile is answered at once.
    pause_s = 1.0

    def __init__(self, server: MetadataServer) -> None:
        self._server = server
        self._etag = ""

    async def ask(self) -> Sequence[Notice]:
        known, self._etag = self._etag, ""  # the plain question comes first after a failure
        wait = f"?wait_for_change=true&timeout_sec={_GCP_HANG_S}&last_etag={known}" if known else ""
        answer = await self._server.ask(
            "GET", _GCP_PATH + wait, _GCP_HEADERS, timeout_s=_GCP_HANG_S + 10.0 if known else 0.0
        )
        value = answer.expect(200).body.strip().upper()
        if value not in {b"TRUE", b"FALSE"}:
            raise Unavailable("the metadata server's answer is neither TRUE nor FALSE")
        etag = answer.headers.get("ETag", "")
        self._etag = etag if etag.isalnum() else ""
        within_s = answer.seconds_until(None, standard_s=_GCP_NOTICE_S)
        return [Notice(within_s, "gcp: preempted")] if value == b"TRUE" else []


_AZURE_HEADERS: Final = {"Metadata": "true"}
_AZURE_EVENTS: Final = "/metadata/scheduledevents?api-version=2020-07-01"
_AZURE_NAME: Final = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_AZURE_FIRST_S: Final = 150.0
#: Events that take this process away, with Azure's notice of each.
_AZURE_NOTICE_S: Final = {"Preempt": 30.0, "Terminate": 300.0, "Redeploy": 600.0, "Reboot": 900.0, "Freeze": 900.0}
#: Longest freeze that is ignored: the machine comes back before its work would go on elsewhere.
_FREEZE_S: Final = 10.0

Text = Annotated[str, Meta(max_length=256)]


class ScheduledEvent(Struct, frozen=True, rename="pascal"):
    """One event, of this or another machine of its set."""

    event_id: Text
    event_type: Text
    event_status: Text = ""
    resources: tuple[str, ...] = ()
    not_before: Text = ""  # as in HTTP; empty once it has begun
    duration_in_seconds: float = -1  # of the standstill; -1: unknown

    @property
    def takes_away(self) -> bool:
        """Whether the event interrupts the machine for long."""
        brief = self.event_type == "Freeze" and self.duration_in_seconds <= _FREEZE_S
        return self.event_type in _AZURE_NOTICE_S and not brief

    def affects(self, name: str) -> bool:
        """Whether machine `name` is concerned."""
        return not name or not self.resources or name.casefold() in map(str.casefold, self.resources)


class ScheduledEventsDocument(Struct, frozen=True, rename="pascal"):
    events: tuple[ScheduledEvent, ...] = ()


class ScheduledEventsProbe:
    """Azure's Scheduled Events: what happens to this machine, and not before when.

    The first answer may take two minutes, because the service starts with the first question. Events are not
    acknowledged: that would bring them forward.
    """

    pause_s = 1.0

    def __init__(self, server: MetadataServer) -> None:
        self._server = server
        self._answered = False
        self._name = ""

    async def ask(self) -> Sequence[Notice]:
        answer = await self._server.ask(
            "GET", _AZURE_EVENTS, _AZURE_HEADERS, timeout_s=10.0 if self._answered else _AZURE_FIRST_S
        )
        events = msgspec.json.decode(answer.expect(200).body, type=ScheduledEventsDocument).events
        self._answered = True
        taking = [event for event in events if event.takes_away]
        if taking and not self._name:
            self._name = await self._own_name()
        return [_notice(event, answer) for event in taking if event.affects(self._name)]

    async def _own_name(self) -> str:
        """This machine's name; empty if the server does not tell: every event counts as this machine's then."""
        try:
            answer = (await self._server.ask("GET", _AZURE_NAME, _AZURE_HEADERS)).expect(200)
        except (Unavailable, TimeoutError, aiohttp.ClientError):
            return ""
        return answer.body.decode("utf-8", "replace").strip()


def _notice(event: ScheduledEvent, answer: MetadataAnswer) -> Notice:
    begun = event.event_status == "Started"
    standard_s = 0.0 if begun else _AZURE_NOTICE_S[event.event_type]
    within_s = answer.seconds_until(parse_date(event.not_before), standard_s=standard_s)
    return Notice(within_s, f"azure: {event.event_type} {event.event_id}{' has begun' if begun else ''}")


PROBES: Final[Mapping[Cloud, Callable[[MetadataServer], Probe]]] = {
    "aws": SpotProbe,
    "gcp": PreemptionProbe,
    "azure": ScheduledEventsProbe,
}
