"""Ranks that publish together publish the same versions, whichever of them gives one up, and whenever."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Iterator
from functools import partial
from typing import Any

import pytest

from ebbtide.auth.security import ClientSecurity
from ebbtide.client import Client
from ebbtide.client.publisher.publisher import Publisher
from ebbtide.client.publisher.rank_exchange import RankPut, RankShare, RankStart, RankWanted, pack, unpack
from ebbtide.client.publisher.tensor_snapshots import TensorSnapshot
from ebbtide.errors import Internal, InvalidRequest, NotReady, Unavailable
from ebbtide.types.weights import PolicyVersion
from ebbtide.weights import NamedTensor, describe, tile_sizes
from tests.support.waiting import wait_until
from tests.unit.client.ranks import MemoryRelay, PipedExchange, Pipes, tensor

VERSION = PolicyVersion(policy="policy", version=1)


@pytest.fixture(autouse=True)
async def nothing_untold() -> AsyncIterator[None]:
    """No error of a task is left for nobody to hear."""
    untold: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: untold.append(context))
    yield
    gc.collect()
    assert not untold


def ranks(relay: MemoryRelay) -> tuple[Publisher, Publisher]:
    pipes = Pipes()
    first, second = (relay.publisher(PipedExchange(pipes, rank)) for rank in range(2))
    return first, second


def whole(value: int = 0) -> list[NamedTensor]:
    """Rank 0's: a tensor of its own, and half of one that is sharded."""
    return [tensor("body", value), tensor("sharded", value, (0,), (8,))]


def piece(value: int = 0) -> list[NamedTensor]:
    return [tensor("sharded", value, (4,), (8,))]


async def outcome(work: Awaitable[PolicyVersion]) -> Any:
    try:
        return (await work).version
    except Exception as error:  # noqa: BLE001 - the outcome of interest
        return type(error)


def committed(relay: MemoryRelay) -> list[list[str]]:
    return [[entry.name for entry in manifest.tensors] for manifest in relay.committed]


ALL = ["body", "sharded", "sharded"]


@pytest.mark.parametrize(("former", "begun"), [(False, 1), (True, 3)])
async def test_a_version_of_which_a_blob_is_lost_is_begun_again_only_at_a_relay_of_the_former_release(
    relay: MemoryRelay, former: bool, begun: int
) -> None:
    first, second = ranks(relay)
    relay.former, relay.drops = former, set(describe(tensor("body", 1)).digests)
    relay.lacks = lambda manifest: [digest for digest in tile_sizes(manifest) if digest not in relay.held]
    ways = await asyncio.gather(first.publish(whole(1)), second.publish(piece(2)))
    assert [(await way).version for way in ways] == [1, 1]
    assert (relay.begun, ways[0].report.bytes_sent) == (begun, 12)


async def test_a_version_that_rank_0_gives_up_is_none_for_all_and_the_next_is_whole(relay: MemoryRelay) -> None:
    first, second = ranks(relay)
    publishing = await first.publish(whole())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(publishing, 0.05)  # the other rank is late
    assert await outcome(await second.publish(piece())) is Unavailable
    for number in (2, 3):
        ways = await asyncio.gather(first.publish(whole(number)), second.publish(piece(number)))
        assert [await outcome(way) for way in ways] == [number, number]
    assert (relay.announced, committed(relay)) == ([2, 3], [ALL, ALL])


async def test_a_version_that_another_rank_gives_up_is_none_for_all_and_the_next_is_whole(relay: MemoryRelay) -> None:
    relay.lacks = lambda manifest: [digest for entry in manifest.tensors for digest in entry.digests]
    first, second = ranks(relay)
    publishing = await second.publish(piece())
    publishing.cancel()
    assert await outcome(await first.publish(whole())) is Unavailable
    with pytest.raises(asyncio.CancelledError):
        await publishing
    relay.lacks = lambda manifest: []
    ways = await asyncio.gather(first.publish(whole(1)), second.publish(piece(1)))
    assert [await outcome(way) for way in ways] == [2, 2]
    assert (relay.announced, committed(relay)) == ([2], [ALL])


@pytest.mark.parametrize("rank", [0, 1])
async def test_ranks_stay_in_step_when_one_is_cancelled_before_its_copy_is_taken(
    rank: int, relay: MemoryRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    taking, go, take = threading.Event(), threading.Event(), TensorSnapshot.take

    def slowly(self: TensorSnapshot, tensors: Any, *, first: bool = True) -> None:
        if first == (rank == 0):
            taking.set()
            go.wait(10.0)
        take(self, tensors, first=first)

    monkeypatch.setattr(TensorSnapshot, "take", slowly)
    relay.lacks = lambda manifest: [digest for entry in manifest.tensors for digest in entry.digests]
    both, given = ranks(relay), [whole(), piece()]
    cut = asyncio.create_task(both[rank].publish(given[rank]))
    await wait_until(taking.is_set)
    cut.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cut
    other = await both[1 - rank].publish(given[1 - rank])
    go.set()
    assert await outcome(other) is Unavailable
    relay.lacks = lambda manifest: []
    ways = await asyncio.gather(both[0].publish(whole(1)), both[1].publish(piece(1)))
    assert [await outcome(way) for way in ways] == [2, 2]
    assert committed(relay) == [ALL]


async def test_a_publisher_that_is_closed_tells_the_others_and_publishes_no_more(relay: MemoryRelay) -> None:
    first, second = ranks(relay)
    publishing = await first.publish(whole())
    closing = asyncio.create_task(first.aclose())
    other = await second.publish(piece())
    assert await outcome(other) is Unavailable
    await closing
    assert publishing.done
    for publisher in (first, second):
        await publisher.aclose()
        with pytest.raises(NotReady, match="closed"):
            await publisher.publish(whole())
    assert not relay.committed


async def test_a_publisher_that_is_closed_has_no_weights_and_its_client_has_forgotten_it(relay: MemoryRelay) -> None:
    pipes = Pipes()
    client = Client(relay="127.0.0.1:1", security=ClientSecurity(token="any"))
    for number in (1, 2):
        second = client.publisher("run", PipedExchange(pipes, 1))
        first = relay.publisher(PipedExchange(pipes, 0))
        for value in (1, 2):
            ways = await asyncio.gather(first.publish(whole(value)), second.publish(piece(value)))
            await asyncio.gather(*ways)
        snapshots = [weakref.ref(one) for one in (first._shadow, first._spare, second._shadow, second._spare)]
        assert client._publishers == {second}
        await asyncio.gather(first.aclose(), second.aclose())
        await second.aclose()
        await wait_until(partial(collected, *snapshots), what=f"snapshots of publish {number}")
        gone = weakref.ref(second)
        del second
        await wait_until(partial(collected, gone), what=f"publisher {number}")
    await client.close()


def collected(*references: "weakref.ref[Any]") -> bool:
    """Whether nothing refers to any of these any more. A thread may hold its last call's arguments for a moment."""
    gc.collect()
    return not any(reference() for reference in references)


async def test_a_version_that_a_closed_publisher_could_not_call_back_leaves_it_no_weights(
    relay: MemoryRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    taking, go, take = threading.Event(), threading.Event(), TensorSnapshot.take

    def slowly(self: TensorSnapshot, tensors: Any, *, first: bool = True) -> None:
        taking.set()
        go.wait(10.0)
        take(self, tensors, first=first)

    monkeypatch.setattr(TensorSnapshot, "take", slowly)
    publisher = relay.publisher()
    beginning = asyncio.create_task(publisher.publish(whole()[:1]))
    await wait_until(taking.is_set)
    await publisher.aclose()
    go.set()
    assert await outcome(await beginning) == 1
    assert [publisher._shadow.room, publisher._spare.room] == [[], []]
    assert publisher._base is None


def test_a_message_of_another_publish_or_kind_is_refused() -> None:
    assert unpack(pack(3, RankStart(version=VERSION)), 3, RankStart) == RankStart(version=VERSION)
    for publish, message, kind in (
        (2, RankShare(), RankShare),
        (3, RankStart(), RankWanted),
        (3, RankWanted(), RankStart),
        (3, RankPut(), RankShare),
    ):
        with pytest.raises(InvalidRequest, match="was expected") as refusal:
            unpack(pack(publish, message), 3, kind)  # type: ignore[type-var]
        assert refusal.value.field == "exchange"
    for data in (b"", b"\x80", pack(3, RankStart())[:-1]):
        with pytest.raises(InvalidRequest, match="was expected"):
            unpack(data, 3, RankStart)


async def test_a_rank_that_told_nothing_ends_the_version(relay: MemoryRelay) -> None:
    pipes = Pipes()
    publishing = await relay.publisher(PipedExchange(pipes, 0)).publish(whole())
    pipes.up.put(pack(1, RankShare()))
    assert await outcome(publishing) is Internal
    assert not relay.committed
    assert unpack(pipes.down.get(), 1, RankStart).version
    assert unpack(pipes.down.get(), 1, RankWanted).failure


async def test_a_rank_that_is_out_of_step_ends_the_version_for_all(relay: MemoryRelay) -> None:
    pipes = Pipes()
    publishing = await relay.publisher(PipedExchange(pipes, 0)).publish(whole())
    pipes.up.put(pack(7, RankShare()))
    with pytest.raises(InvalidRequest, match="RankShare of publish 1 was expected, not RankShare of 7"):
        await publishing
    assert unpack(pipes.down.get(), 1, RankStart).version
    assert unpack(pipes.down.get(), 1, RankWanted).failure


async def test_the_room_for_the_next_version_is_nobodys_while_it_is_written_to(
    relay: MemoryRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, making, make_room, take = threading.Event(), list[int](), TensorSnapshot.make_room, TensorSnapshot.take

    def slowly(self: TensorSnapshot, room: Any) -> None:
        making.append(id(self))
        go.wait(10.0)
        make_room(self, room)
        making.remove(id(self))

    def spy(self: TensorSnapshot, *args: Any, **kwargs: Any) -> None:
        assert id(self) not in making
        take(self, *args, **kwargs)

    monkeypatch.setattr(TensorSnapshot, "make_room", slowly)
    monkeypatch.setattr(TensorSnapshot, "take", spy)
    publisher = relay.publisher()
    await (await publisher.publish(whole()[:1]))
    second = asyncio.create_task(publisher.publish(whole(1)[:1]))
    await wait_until(lambda: bool(making))
    closing = asyncio.create_task(publisher.aclose())
    done, _ = await asyncio.wait({second}, timeout=0.1)
    assert not done
    go.set()
    with pytest.raises(NotReady, match="closed"):
        await second
    await closing


async def test_a_version_that_fails_and_that_nobody_awaits_is_logged(
    relay: MemoryRelay, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = relay.publisher()

    async def refuse(manifest: Any) -> PolicyVersion:
        raise InvalidRequest("not this one", field="version")

    relay.commit = refuse  # type: ignore[method-assign]
    await publisher.publish(whole()[:1])
    await wait_until(lambda: "version 1 was not published: version: not this one" in caplog.text)
    await publisher.aclose()


@pytest.mark.parametrize("several", [False, True])
async def test_a_version_that_is_cancelled_is_over_once_no_thread_reads_its_tensors(
    relay: MemoryRelay, several: bool
) -> None:
    reading, may_go_on = threading.Event(), threading.Event()

    def tensors() -> Iterator[NamedTensor]:
        reading.set()
        may_go_on.wait(10)
        yield tensor("a")

    publisher, second = ranks(relay) if several else (relay.publisher(), None)
    publishing = asyncio.create_task(publisher.publish(tensors()))
    await asyncio.to_thread(reading.wait, 10)
    publishing.cancel()
    done, _ = await asyncio.wait({publishing}, timeout=0.1)
    assert not done
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(publishing, 10)
    if second is not None:
        assert await outcome(await second.publish(piece())) is Unavailable
        await second.aclose()
    await publisher.aclose()
