"""What workers and relays rely on alike: each blob is verified and handed over once, and who is at fault is blamed."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from ebbtide.errors import (
    ChunkCorrupt,
    EbbtideError,
    InvalidRequest,
    NoCapacity,
    NotReady,
    Unavailable,
    VersionUnavailable,
)
from ebbtide.transfer.blob_cache import BlobCache
from ebbtide.transfer.blob_fetcher import BlobBatch, BlobFetcher, FetchMeans
from ebbtide.transfer.digest_threads import DigestThreads
from ebbtide.transfer.sources import UNLISTED, OpenSource, SourcePool
from ebbtide.transfer.version_finder import FoundVersion
from ebbtide.types.weights import Holder
from ebbtide.weights import tile_digest
from tests.support.waiting import wait_until
from tests.unit.transfer.test_pool import source

BLOBS = {tile_digest(data): data for number in range(40) if (data := bytes([number]) * 100)}
DIGESTS = tuple(BLOBS)


class Sender:
    """A source of all blobs. `mangle` may change what is sent, or raise; `gates` keep blobs back."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.calls = 0
        self.mangle: Callable[[bytes, bytes], tuple[bytes, bytes]] = lambda digest, data: (digest, data)
        self.gates: dict[bytes, asyncio.Event] = {}

    async def tiles(self, digests: Sequence[bytes]) -> AsyncGenerator[tuple[bytes, bytes], None]:
        self.calls += 1
        for digest in digests:
            if digest in self.gates:
                await self.gates[digest].wait()
            found = self.mangle(digest, BLOBS[digest])
            self.sent.append(digest)
            yield found

    async def close(self) -> None:
        """Nothing is open."""


class Kept:
    """A sink that keeps all, and fails for those in `refused`."""

    def __init__(self) -> None:
        self.blobs: list[tuple[bytes, str]] = []
        self.refused: dict[bytes, EbbtideError] = {}

    async def take(self, _batch: BlobBatch, blobs: dict[bytes, bytes], source: str) -> None:
        for digest, data in blobs.items():
            if digest in self.refused:
                raise self.refused[digest]
            assert BLOBS[digest] == data
            self.blobs.append((digest, source))

    @property
    def digests(self) -> list[bytes]:
        return [digest for digest, _ in self.blobs]


class Bench:
    """A relay, and a peer nearer than it."""

    def __init__(self, threads: DigestThreads) -> None:
        self.relay, self.peer, self.kept = Sender(), Sender(), Kept()
        self.threads, self.cache = threads, BlobCache(1 << 20)
        self.faults: list[EbbtideError] = []
        self.asked = 0
        itself = OpenSource(self.relay, "relay", "relay:1", UNLISTED)
        self.pool = SourcePool(itself, lambda _source, _reader: self.peer, Holder(name="me", site="here", host="mine"))
        self.pool.renew([source("peer", site="here")])

    async def find(self) -> FoundVersion:
        self.asked += 1
        return FoundVersion(sources=(source("peer", site="here"),))

    async def fetch(self, *batches: Sequence[bytes], streams: int = 1, again_s: float = 0.0) -> None:
        sizes = [BlobBatch({digest: len(BLOBS[digest]) for digest in batch}) for batch in batches or [DIGESTS]]
        means = FetchMeans(threads=self.threads, streams=streams, silence_s=5.0, hand_over_blobs=1, cache=self.cache)
        fetcher = BlobFetcher(sizes, self.kept.take, self.pool, means, on_fault=self.faults.append)
        await fetcher.run(self.find, again_s)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    threads = DigestThreads()
    yield Bench(threads)
    threads.close()


def failing(at: bytes, error: EbbtideError) -> Callable[[bytes, bytes], tuple[bytes, bytes]]:
    def mangle(digest: bytes, data: bytes) -> tuple[bytes, bytes]:
        if digest == at:
            raise error
        return digest, data

    return mangle


async def test_one_stream_hands_all_blobs_over_in_order(bench: Bench) -> None:
    await bench.fetch(DIGESTS[:10], DIGESTS[10:])
    assert bench.kept.digests == list(DIGESTS)
    assert bench.relay.sent == []


async def test_several_streams_hand_each_blob_over_once(bench: Bench) -> None:
    await bench.fetch(*(DIGESTS[at : at + 5] for at in range(0, 40, 5)), streams=3)
    assert sorted(bench.kept.digests) == sorted(DIGESTS)


@pytest.mark.parametrize(
    "lie",
    [
        lambda digest, data: (digest, data[:-1] + b"x"),
        lambda digest, data: (digest, data[:-1]),
        lambda digest, data: (digest, data + b"x"),
        lambda digest, data: (bytes(32), data),
    ],
    ids=["flipped", "cut", "longer", "not asked for"],
)
async def test_what_does_not_match_is_fetched_elsewhere_and_the_rest_is_kept(bench: Bench, lie: Any) -> None:
    bench.peer.mangle = lambda digest, data: lie(digest, data) if digest == DIGESTS[7] else (digest, data)
    await bench.fetch()
    assert bench.kept.blobs[:7] == [(digest, "peer") for digest in DIGESTS[:7]]
    assert sorted(bench.kept.blobs[7:]) == sorted((digest, "relay") for digest in DIGESTS[7:])
    assert [type(fault) for fault in bench.faults] == [ChunkCorrupt]
    assert bench.pool.failed == ("peer:1",)


async def test_who_lacks_a_blob_is_passed_over_for_its_batch_alone(bench: Bench) -> None:
    bench.peer.mangle = failing(DIGESTS[0], VersionUnavailable("has it not"))
    await bench.fetch(DIGESTS[:2], DIGESTS[2:])
    assert [name for _, name in bench.kept.blobs] == ["relay"] * 2 + ["peer"] * 38
    assert bench.pool.failed == ()


async def test_known_blobs_are_handed_over_and_not_fetched(bench: Bench) -> None:
    for digest in DIGESTS[:39]:
        bench.cache.put(digest, BLOBS[digest])
    await bench.fetch()
    assert bench.kept.blobs == [(digest, "") for digest in DIGESTS[:39]] + [(DIGESTS[39], "peer")]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (NotReady("gone"), Unavailable),
        (ChunkCorrupt("lies"), ChunkCorrupt),
        (NoCapacity("is full", retry_after_s=10.0), NoCapacity),
    ],
)
async def test_why_the_last_source_failed_is_told(
    bench: Bench, error: EbbtideError, told: type[EbbtideError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.transfer.sources._BUSY_S", 0.0)
    bench.peer.mangle = failing(DIGESTS[3], Unavailable("broke off"))
    bench.relay.mangle = failing(DIGESTS[3], error)
    with pytest.raises(told):
        await bench.fetch()
    assert bench.kept.digests == list(DIGESTS[:3])


async def test_an_error_of_the_sink_ends_all_streams_and_blames_no_source(bench: Bench) -> None:
    bench.kept.refused = {DIGESTS[5]: InvalidRequest("lies about its size", field="tensors.digests")}
    bench.peer.gates = {DIGESTS[21]: asyncio.Event()}  # never opened
    with pytest.raises(InvalidRequest, match="lies"):
        await asyncio.wait_for(bench.fetch(DIGESTS[20:], DIGESTS[:20], streams=2), 3.0)
    assert (bench.faults, bench.pool.failed) == ([], ())


async def test_a_source_that_ends_as_if_cancelled_does_not_pass_for_done(bench: Bench) -> None:
    def mangle(digest: bytes, data: bytes) -> tuple[bytes, bytes]:
        raise asyncio.CancelledError

    bench.peer.mangle = mangle
    with pytest.raises(Unavailable, match="closed while it was read"):
        await bench.fetch()


async def test_a_lone_first_blob_is_waited_for_before_others_are_asked_for(bench: Bench) -> None:
    bench.peer.gates = {DIGESTS[0]: asyncio.Event()}
    fetching = asyncio.create_task(bench.fetch(DIGESTS[:20], DIGESTS[20:], streams=2))
    await wait_until(lambda: bench.peer.calls == 1)
    await asyncio.sleep(0)
    assert bench.peer.calls == 1
    bench.peer.gates[DIGESTS[0]].set()
    await fetching
    assert bench.peer.calls == 2


async def test_sources_are_asked_for_again_while_blobs_come(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.transfer.blob_fetcher._AGAIN_S", 0.01)
    bench.peer.gates = {DIGESTS[0]: asyncio.Event()}
    fetching = asyncio.create_task(bench.fetch(again_s=0.01))
    await wait_until(lambda: bench.asked == 1)
    bench.peer.gates[DIGESTS[0]].set()
    await fetching
    assert bench.asked == 1, "what was answered wants no other question"
