"""A stream of the SDK outlasts every absence of its service that is shorter than the patience, and no longer one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.auth.security import ClientSecurity
from ebbtide.client import service_peer
from ebbtide.client.service_peer import ServicePeer
from ebbtide.errors import StoreUnavailable, Unavailable
from tests.fakes.clocks import SetClock


class QuietStream:
    """A call without messages. It ends after `lasts_s`, with `error` if there is one."""

    def __init__(self, clock: SetClock, lasts_s: float, error: Exception | None, *, connects: bool = True) -> None:
        self._clock, self._lasts_s, self._error, self.connects = clock, lasts_s, error, connects

    async def __aiter__(self) -> AsyncIterator[str]:
        await give_turns()
        self._clock.now += self._lasts_s
        if self._error is not None:
            raise self._error
        yield "a message at last"

    def cancel(self) -> None:
        pass


async def give_turns() -> None:
    """Let other tasks run."""
    for _ in range(3):
        await asyncio.sleep(0)


class Absences:
    """A service that is there and away in turn, in virtual time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, patience_s: float) -> None:
        self.clock = SetClock(100.0)
        monkeypatch.setattr(service_peer, "time", SimpleNamespace(monotonic=self.clock))
        self.peer = ServicePeer("coordinator", "127.0.0.1:1", ClientSecurity(token="t"), patience_s)
        monkeypatch.setattr(self.peer.channel, "pause", self._pause)
        monkeypatch.setattr(self.peer.channel, "channel_ready", self._ready)
        self.streams: list[QuietStream] = []

    async def _pause(self, seconds: float) -> None:
        self.clock.now += seconds

    async def _ready(self) -> None:
        if not self._stream.connects:
            await asyncio.Event().wait()

    def _next(self) -> QuietStream:
        self._stream = self.streams.pop(0)
        return self._stream

    def there(self, seconds: float, error: Exception | None = None) -> None:
        self.streams.append(QuietStream(self.clock, seconds, error or Unavailable("it died")))

    def away(self, seconds: float) -> None:
        self.streams += [QuietStream(self.clock, 1.0, Unavailable("refused"), connects=False)] * int(seconds)

    async def first(self) -> str:
        """The stream's first message; the service is there for good at last."""
        self.streams.append(QuietStream(self.clock, 1.0, None))
        resume: Any = self._next
        async with aclosing(self.peer.follow(resume)) as messages:
            first: str = await anext(messages)
            return first


async def test_patience_begins_anew_with_each_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Absences(monkeypatch, patience_s=60.0)
    for _ in range(4):
        service.there(8.0)
        service.away(12.0)  # with pauses of two seconds between the tries
    assert await service.first() == "a message at last"
    assert service.clock.now > 100.0 + 2 * 60.0


async def test_what_never_comes_back_exhausts_the_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Absences(monkeypatch, patience_s=60.0)
    service.there(8.0)
    service.away(100.0)
    with pytest.raises(Unavailable, match="refused"):
        await service.first()
    assert 108.0 + 55.0 < service.clock.now < 108.0 + 62.0


@pytest.mark.parametrize("error", [StoreUnavailable("away"), Unavailable("it died")])
async def test_a_service_that_refuses_every_stream_exhausts_the_patience_too(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    service = Absences(monkeypatch, patience_s=60.0)
    for _ in range(100):
        service.there(10.0 if isinstance(error, StoreUnavailable) else 1.0, error)
    with pytest.raises(type(error)):
        await service.first()
    assert service.clock.now < 100.0 + 80.0
