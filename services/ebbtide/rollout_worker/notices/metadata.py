"""Asks a cloud's metadata server over HTTP: no proxy, no redirect, no cookie, no long answer."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Final, NamedTuple, Self

import aiohttp

from ebbtide.errors import Unavailable

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
        known = when is not None and now is not None
        left_s = (when - now) / timedelta(seconds=1) if known and when and now else standard_s
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
    """A connection to the server; use as an async context manager."""

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
