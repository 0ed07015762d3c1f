"""Readers of long completions give their places to others, within a bound for all sessions of a gateway."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.gateway.sessions import live
from ebbtide.gateway.sessions.live import LiveSession, LongReaders


async def test_long_readers_give_their_places_back_as_far_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_HELD_S", 0.01)
    monkeypatch.setattr(live, "_AT_ONCE", 1)
    room = LongReaders(room=1)
    player: Any = SimpleNamespace(model=SimpleNamespace(text=None))
    source: Any = None
    first, second = (LiveSession(name, "owner", source, player, room) for name in ("first", "second"))
    async with first._place():
        async with asyncio.timeout(30), first._place():  # once the other one has read for a while
            assert room.room == 0
        async with second._place():
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2), second._place():
                    pass
    assert room.room == 1
    async with asyncio.timeout(30), first._place(), second._place():
        pass
