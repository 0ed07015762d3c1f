"""Whom a pull asks next, and for how long it waits for an answer."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

import pytest

from ebbtide.errors import (
    ChunkCorrupt,
    Internal,
    InvalidRequest,
    NoCapacity,
    NotReady,
    Unavailable,
    VersionUnavailable,
)
from ebbtide.transfer.sources import OpenSource, SourcePool
from ebbtide.types.weights import BlobSource, Holder


class Mute:
    """A source that is never read."""

    def __init__(self) -> None:
        self.closed = 0

    async def tiles(self, digests: Sequence[bytes]) -> AsyncGenerator[tuple[bytes, bytes], None]:
        for digest in digests:
            yield digest, b""

    async def close(self) -> None:
        self.closed += 1


def source(name: str, *, site: str = "far", host: str = "") -> BlobSource:
    return BlobSource(name=name, address=f"{name}:1", site=site, host=host)


class Scene:
    """A pool, and what it opened."""

    def __init__(self, *sources: BlobSource, rates: dict[int, float] | None = None) -> None:
        self.opened: list[Mute] = []
        self.relay = OpenSource(Mute(), "weight-relay", "relay:1", 3)
        self.pool = SourcePool(self.relay, self._open, Holder(name="me", site="here", host="mine"), rates)
        self.pool.renew(sources)

    def _open(self, found: BlobSource, reader: Holder) -> Mute:
        if found.name == "unopenable":
            raise InvalidRequest("is no address", field="address")
        self.opened.append(Mute())
        return self.opened[-1]

    def picked(self, count: int) -> list[str]:
        """The names of the next sources, whose streams go on."""
        names = []
        for _ in range(count):
            found = self.pool.pick()
            found.streams += 1
            names.append(found.name)
        return names


def test_the_nearest_are_asked_and_share_the_streams() -> None:
    scene = Scene(source("far"), source("one", site="here"), source("two", site="here"))
    assert scene.picked(4) == ["one", "two", "one", "two"]
    scene = Scene(source("one", site="here"), source("same", site="here", host="mine"))
    assert scene.picked(2) == ["same", "same"]


def test_the_relay_is_asked_when_all_others_failed_or_where_it_was_listed() -> None:
    scene = Scene(source("peer", site="here"))
    scene.pool.drop(scene.pool.pick(), Unavailable("gone"))
    assert scene.picked(1) == ["weight-relay"]
    assert Scene().picked(1) == ["weight-relay"]
    listed = BlobSource(name="relay", address="", site="here")
    assert Scene(source("far"), listed).picked(1) == ["weight-relay"]


def test_when_nobody_is_left_the_relays_own_error_is_raised() -> None:
    scene = Scene(source("peer"))
    scene.pool.drop(scene.pool.pick(), ChunkCorrupt("lied"))
    scene.pool.drop(scene.pool.pick(), Unavailable("gone"))
    with pytest.raises(Unavailable, match="gone"):
        scene.pool.pick()
    scene.pool.renew([source("peer")])
    assert scene.picked(1) == ["peer"]


@pytest.mark.parametrize("first", ["peer", "relay"])
def test_what_a_peer_says_last_does_not_count_for_more_than_what_the_relay_says(first: str) -> None:
    scene = Scene(source("peer"))
    peer = scene.pool.pick()
    failures = [(peer, Internal("a fault of the peer")), (scene.relay, Unavailable("the relay restarts"))]
    for failed, error in failures if first == "peer" else reversed(failures):
        scene.pool.drop(failed, error)
    with pytest.raises(Unavailable, match="the relay restarts"):
        scene.pool.pick()


def test_a_peers_fault_is_waited_out_where_the_relay_has_not_got_it() -> None:
    scene = Scene(source("peer"))
    scene.pool.drop(scene.pool.pick(), Internal("a fault of the peer"))
    with pytest.raises(Unavailable, match="failed"):
        scene.pool.pick({"relay:1"})


def test_who_failed_while_the_relay_was_asked_is_not_asked_again() -> None:
    scene = Scene(source("one", site="here"), source("two", site="here"))
    scene.pool.drop(scene.pool.pick(), Unavailable("gone"))
    dropped = scene.pool.dropped
    scene.pool.drop(scene.pool.pick(), Unavailable("gone"))
    scene.pool.renew([source("one", site="here"), source("two", site="here")], dropped)
    assert scene.picked(2) == ["one", "one"]
    assert scene.pool.failed == ("two:1",)


async def test_a_dropped_source_is_closed_as_soon_as_nobody_reads_from_it() -> None:
    scene = Scene(source("one"), source("two"))
    one = scene.pool.pick()
    async with one.patience(5.0, 10):
        scene.pool.drop(one, Unavailable("gone"))
        await scene.pool.close_dropped()
        assert scene.opened[0].closed == 0
    await scene.pool.close_dropped()
    assert scene.opened[0].closed == 1
    await scene.pool.close()
    assert scene.opened[0].closed == 1


def test_a_stream_of_a_source_dropped_before_says_nothing_of_the_one_opened_since() -> None:
    scene = Scene(source("one", site="here"))
    old = scene.pool.pick()
    scene.pool.drop(old, Unavailable("gone"))
    scene.pool.renew([source("one", site="here")])
    new = scene.pool.pick()
    scene.pool.drop(old, Unavailable("gone"))
    assert scene.pool.pick() is new is not old


def test_only_faults_are_told() -> None:
    peers = ("unopenable", "poor", "full", "liar", "gone")
    scene = Scene(*(source(name) for name in peers))
    errors = [VersionUnavailable("has it not"), NoCapacity("is full"), ChunkCorrupt("lied"), Unavailable("is gone")]
    for error in errors:
        scene.pool.drop(scene.pool.pick(), error)
    assert set(scene.pool.failed) == {"unopenable:1", "liar:1", "gone:1"}


def test_what_is_busy_nearby_is_waited_for_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    scene = Scene(source("far"), source("one", site="here"), source("two", site="here"))
    for wait in (0.5, 0.7):
        scene.pool.drop(scene.pool.pick(), NoCapacity("is full", retry_after_s=wait))
    assert scene.pool.failed == ()
    assert scene.pool.busy_s() == pytest.approx(0.5)
    now += 0.5
    assert scene.pool.busy_s() == 0.0
    assert scene.picked(1) == ["one"]
    for _ in range(30):
        scene.pool.drop(scene.pool._open["one:1"], NoCapacity("is full", retry_after_s=1000.0))
        scene.pool.drop(scene.pool._open["two:1"], NoCapacity("is full", retry_after_s=1.0))
        now += scene.pool.busy_s()
    assert scene.pool.busy_s() == 0.0, "long enough"
    assert scene.picked(1) == ["far"]
    scene.pool.served()
    assert scene.pool.busy_s() > 0.0


def test_a_busy_relay_is_said_to_be_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    scene = Scene(source("peer"))
    scene.pool.drop(scene.pool.pick(), NoCapacity("is full", retry_after_s=0.5))
    assert scene.picked(1) == ["weight-relay"]
    scene.pool.drop(scene.relay, NoCapacity("is full", retry_after_s=0.3))
    with pytest.raises(NoCapacity, match="busy"):
        scene.pool.pick()


def test_who_lacks_something_is_passed_over_for_that() -> None:
    scene = Scene(source("one", site="here"), source("two", site="here"))
    assert scene.pool.pick({"one:1"}).name == "two"
    assert scene.pool.pick({"one:1", "two:1"}).name == "weight-relay"
    with pytest.raises(NotReady, match="no source"):
        scene.pool.pick({"one:1", "two:1", "relay:1"})
    assert scene.pool.pick().name == "one"


async def test_a_dropped_source_whose_close_is_cancelled_is_closed_with_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(source("a"), source("b"))
    for _ in range(2):
        scene.pool.drop(scene.pool.pick(), Unavailable("broken"))
    closing, close = asyncio.Event(), Mute.close

    async def hanging(_self: Mute) -> None:
        closing.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Mute, "close", hanging)
    task = asyncio.create_task(scene.pool.close_dropped())
    await closing.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    monkeypatch.setattr(Mute, "close", close)
    await scene.pool.close()
    assert [opened.closed for opened in scene.opened] == [1, 1]


async def test_what_was_opened_is_closed_once() -> None:
    scene = Scene(source("one"), source("two"))
    scene.picked(2)
    scene.pool.drop(scene.pool._open["one:1"], Unavailable("gone"))
    await scene.pool.close()
    assert [opened.closed for opened in scene.opened] == [1, 1]


def allowance(found: OpenSource) -> float:
    (clock,) = found._clocks
    when = clock.when()
    assert when is not None
    return when - asyncio.get_running_loop().time()


async def test_patience_grows_with_the_pauses_of_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    now, loop = 1000.0, asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", lambda: now)
    found = Scene().relay
    async with found.patience(5.0, 1 << 20):
        assert allowance(found) == pytest.approx(5.0 + 16.0)
        now += 2.0
        found.heard(1 << 20)
        assert allowance(found) == pytest.approx(5.0 + 4 * 2.0)
        now += 3.0
        found.heard(1 << 20)
        assert allowance(found) == pytest.approx(5.0 + 4 * 3.0)
        now += 1.0
        found.heard(1 << 20)
        assert allowance(found) == pytest.approx(5.0 + 4 * 3.0)
    async with found.patience(5.0, 1 << 20):
        assert allowance(found) == pytest.approx(5.0 + 4 * 3.0), "what was learnt stays"
    monkeypatch.undo()


async def test_larger_blobs_may_take_longer_but_never_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now, loop = 1000.0, asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", lambda: now)
    found = Scene().relay
    async with found.patience(1.0, 1000):
        now += 0.5
        found.heard(1000)
    async with found.patience(1.0, 4000):
        assert allowance(found) == pytest.approx(1.0 + 8.0)
    async with found.patience(1.0, 1 << 20):
        assert allowance(found) == pytest.approx(1.0 + 60.0)
    monkeypatch.undo()


async def test_a_blob_in_one_stream_is_a_sign_of_life_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    now, loop = 1000.0, asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", lambda: now)
    found = Scene().relay
    async with found.patience(5.0, 10), found.patience(5.0, 10):
        now += 1.0
        found.heard(10)
        assert [clock.when() for clock in found._clocks] == [now + 5.0 + 4.0] * 2
    monkeypatch.undo()


async def test_what_a_reader_does_meanwhile_is_not_a_sources_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now, loop = 1000.0, asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", lambda: now)
    found = Scene().relay
    async with found.patience(5.0, 1 << 20) as clock:
        found.heard(1 << 20)
        with found.resting(clock):
            assert clock.when() is None
            now += 1000.0
        assert allowance(found) == pytest.approx(5.0), "no pause of its own was seen yet"
    monkeypatch.undo()


async def test_a_reader_that_rests_leaves_the_others_clocks_running(monkeypatch: pytest.MonkeyPatch) -> None:
    now, loop = 1000.0, asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", lambda: now)
    found = Scene().relay
    async with found.patience(5.0, 10) as one, found.patience(5.0, 10) as two:
        with found.resting(one):
            now += 2.0
            found.heard(10)
            assert (one.when(), two.when()) == (None, now + 5.0 + 8.0)
        assert one.when() == now + 5.0 + 8.0
    monkeypatch.undo()


async def test_silence_ends_a_stream() -> None:
    found = Scene().relay
    with pytest.raises(Unavailable, match="weight-relay at relay:1 has stalled"):
        async with found.patience(0.05, 10):
            await asyncio.Event().wait()
    assert found.streams == 0
    assert not found._clocks
