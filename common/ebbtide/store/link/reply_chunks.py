"""Reads a dialled link's replies chunk by chunk: all that came together are there at once.

redis-py's reader goes through several coroutines for each reply, and most of the coordinator's calls are small.
"""

from typing import Any, Final

import hiredis
import redis.exceptions
from redis.asyncio.connection import AbstractConnection

_CHUNK_BYTES: Final = 1 << 16


class ReplyChunks:
    """The replies to commands that are sent from now on; nothing else may read from the link."""

    def __init__(self, link: AbstractConnection) -> None:
        connected: Any = link  # redis-py hands both parts to its own parsers alone
        self._stream = connected._reader  # noqa: SLF001
        self._parser = hiredis.Reader(
            protocolError=redis.exceptions.InvalidResponse,
            replyError=connected._parser.parse_error,  # noqa: SLF001
        )

    async def next(self) -> list[Any]:
        """The replies that came together, perhaps none; errors among them as exceptions. Raises `ConnectionError` of
        redis once the server closed the link.
        """
        data = await self._stream.read(_CHUNK_BYTES)
        if not data:
            raise redis.exceptions.ConnectionError("the store closed the connection")
        self._parser.feed(data)
        replies: list[Any] = []
        while (reply := self._parser.gets()) is not False:
            replies.append(reply)
        return replies
