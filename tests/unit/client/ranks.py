"""Ranks that publish together in one process, and a relay that keeps what it is told in memory."""

import queue
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from ebbtide.client.publisher.publisher import Authority, Publisher
from ebbtide.client.publisher.rank_exchange import RankExchange
from ebbtide.types.weights import Manifest, Patch, PolicyVersion
from ebbtide.weights import NamedTensor, mark_missing, staged_sizes
from ebbtide.weights.version_encoding import Encoding

T = TypeVar("T")


class Pipes:
    """An exchange of two ranks: what each has said, and the other has not heard."""

    def __init__(self) -> None:
        self.up: queue.Queue[bytes] = queue.Queue()
        self.down: queue.Queue[bytes] = queue.Queue()


class PipedExchange:
    size = 2

    def __init__(self, pipes: Pipes, rank: int) -> None:
        self.rank, self._pipes = rank, pipes

    def gather(self, data: bytes) -> list[bytes]:
        if self.rank:
            self._pipes.up.put(data)
            return []
        return [data, self._pipes.up.get(timeout=20.0)]

    def broadcast(self, data: bytes) -> bytes:
        if self.rank:
            return self._pipes.down.get(timeout=20.0)
        self._pipes.down.put(data)
        return data


class MemoryRelay:
    """The calls of `Staging`. `lacks` says which blobs of a manifest it has not when the publish begins.

    `former`: of the release whose relays do not answer a put with what is missing.
    """

    patience_s = 1.0
    channel = None

    def __init__(self) -> None:
        self.peer = self
        self.begun = 0
        self.former = False
        self.drops: set[bytes] = set()  # blobs that are lost once when they are put
        self.forgets = False  # whether all blobs are lost that are put
        self.puts: list[bytes] = []  # blobs, as often as they were put
        self._staged: dict[bytes, int] = {}
        self.held: set[bytes] = set()
        self.committed: list[Manifest] = []
        self.announced: list[int] = []
        self.lacks: Callable[[Manifest], list[bytes]] = lambda manifest: []
        self._numbers = iter(range(1, 100))

    async def attempt(self, call: Callable[[], Awaitable[T]], *, on: Any = ()) -> T:
        return await call()

    async def begin(self, manifest: Manifest, patch: Patch | None) -> list[bytes]:
        self.begun += 1
        self._staged, missing = staged_sizes(manifest, patch), self.lacks(manifest)
        self.held |= self._staged.keys() - set(missing)
        return missing

    async def put(
        self, version: PolicyVersion, encoding: Encoding, digests: Iterable[bytes], sent: Callable[[int], None]
    ) -> bytes | None:
        for digest in digests:
            sent(len(bytes(encoding.blob(digest))))
            self.puts.append(digest)
            if digest in self.drops:
                self.drops.discard(digest)
            elif not self.forgets:
                self.held.add(digest)
        return await self.missing(version)

    async def missing(self, version: PolicyVersion) -> bytes | None:
        return None if self.former else mark_missing(self._staged, self.held)

    async def commit(self, manifest: Manifest) -> PolicyVersion:
        self.committed.append(manifest)
        return manifest.version

    def publisher(self, exchange: RankExchange | None = None) -> Publisher:
        async def reserve() -> tuple[int, bytes]:
            return next(self._numbers), bytes(32)

        async def announce(version: PolicyVersion) -> None:
            self.announced.append(version.version)

        authority = Authority(reserve, announce) if exchange is None or exchange.rank == 0 else None
        peer: Any = self
        return Publisher(peer, "run", "policy", authority=authority, exchange=exchange, threads=1)


def tensor(name: str, value: int = 0, start: tuple[int, ...] = (), full: tuple[int, ...] = ()) -> NamedTensor:
    """Four bytes of `value`."""
    data = memoryview(bytearray([value] * 4))
    return NamedTensor(name=name, dtype="U8", shape=(4,), data=data, start=start, full=full)
