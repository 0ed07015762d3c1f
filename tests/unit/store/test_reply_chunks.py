"""Replies of the store are read whole and in order, however the network cuts them."""

import asyncio
from typing import Any

import pytest
import redis.exceptions
from redis.asyncio.connection import Connection

from ebbtide.store.dialer import ReplyChunks


class Wire:
    """What a server sends, in the pieces of a test."""

    def __init__(self) -> None:
        self._reader, link = asyncio.StreamReader(), Connection()
        link._reader = self._reader
        self.chunks = ReplyChunks(link)

    async def send(self, piece: bytes) -> list[Any]:
        """The replies that are there after this piece."""
        self._reader.feed_data(piece)
        return await self.chunks.next()

    async def end(self) -> list[Any]:
        self._reader.feed_eof()
        return await self.chunks.next()


async def test_replies_that_come_in_single_bytes_are_read_whole_and_once() -> None:
    wire, found = Wire(), list[Any]()
    for byte in b"+OK\r\n:7\r\n$5\r\na\r\nbc\r\n$-1\r\n*2\r\n$1\r\nx\r\n:0\r\n":
        found += await wire.send(bytes([byte]))
    assert found == [b"OK", 7, b"a\r\nbc", None, [b"x", 0]]


async def test_replies_that_come_together_are_there_at_once_with_the_errors_in_their_places() -> None:
    found = await Wire().send(b":1\r\n-NOSCRIPT No matching script\r\n-TERM\r\n*1\r\n-LEASE gone\r\n:2\r\n")
    assert (found[0], found[-1]) == (1, 2)
    assert isinstance(found[1], redis.exceptions.NoScriptError)
    assert isinstance(found[2], redis.exceptions.ResponseError)
    assert str(found[2]) == "TERM"
    assert isinstance(found[3][0], redis.exceptions.ResponseError)


async def test_a_reply_of_many_chunks_is_one_reply() -> None:
    wire, body = Wire(), bytes(range(256)) * 20_000
    found, sent = list[Any](), b"$%d\r\n%s\r\n:3\r\n" % (len(body), body)
    for at in range(0, len(sent), 1 << 16):
        found += await wire.send(sent[at : at + (1 << 16)])
    assert found == [body, 3]


async def test_what_is_no_reply_and_a_closed_link_break_the_connection() -> None:
    with pytest.raises(redis.exceptions.InvalidResponse):
        await Wire().send(b"HTTP/1.1 400 Bad Request\r\n")
    wire = Wire()
    assert await wire.send(b"$5\r\nab") == []
    with pytest.raises(redis.exceptions.ConnectionError, match="closed"):
        await wire.end()
