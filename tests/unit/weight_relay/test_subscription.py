"""What a relay brings from its upstream, in which order, and that odd sources keep nothing from it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import EbbtideError, Internal, InvalidRequest, NoCapacity, Unauthenticated, VersionUnavailable
from ebbtide.transfer.version_finder import PathRequest
from ebbtide.types.weights import BlobSource, Holder
from ebbtide.weight_relay import subscription
from ebbtide.weight_relay.service import WeightRelay
from ebbtide.weight_relay.subscription import Subscription
from tests.integration.weight_relay.lines import Line
from tests.support.waiting import wait_until
from tests.unit.weight_relay.relays import SMALL, held, relay_at
from tests.unit.weight_relay.upstreams import LineUpstream

PEER = BlobSource(name="peer", address="peer:1", site="here")


class Following:
    """A relay that follows an upstream."""

    def __init__(self, relay: WeightRelay, upstream: LineUpstream) -> None:
        self.relay, self.upstream = relay, upstream
        self.holders = relay.holders
        self.subscription = Subscription(
            relay.intake, relay.library.index, relay.ended, relay.holders, upstream, patience_s=5.0
        )

    def ask(self, version: int) -> asyncio.Task[int]:
        return asyncio.create_task(self.subscription.ask("run", "policy", version))

    def arriving(self) -> set[int]:
        return {stage.number for stage in self.relay.library.index.stages if stage.arriving}


@asynccontextmanager
async def following(folder: Path, upstream: LineUpstream, **settings: Any) -> AsyncIterator[Following]:
    relay = relay_at(folder, **settings)
    await relay.open()
    found = Following(relay, upstream)
    running = asyncio.create_task(found.subscription.run())
    try:
        yield found
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await relay.close()


@pytest.mark.parametrize("error", [Internal("odd"), Unauthenticated("who?"), InvalidRequest("no", field="digest")])
async def test_a_source_with_an_odd_error_is_passed_over(tmp_path: Path, error: EbbtideError) -> None:
    upstream = LineUpstream(Line(1, sizes=SMALL), 0, error, peers=[PEER])
    async with following(tmp_path, upstream) as relay:
        upstream.publish(1)
        await wait_until(lambda: held(relay.relay) == [1])


async def test_an_upstream_with_an_odd_error_is_asked_again(tmp_path: Path) -> None:
    line = Line(1, sizes=SMALL)
    upstream = LineUpstream(line, 0)
    upstream.blobs = type(upstream.blobs)(line, Internal("odd"), Internal("odd"))
    async with following(tmp_path, upstream) as relay:
        upstream.publish(1)
        await wait_until(lambda: held(relay.relay) == [1])


async def test_a_slow_disk_here_is_no_silence_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription, "_SILENCE_S", 0.05)
    upstream = LineUpstream(Line(1, sizes=SMALL), 0)
    async with following(tmp_path, upstream) as relay:
        put = relay.relay.intake.put

        async def slow_put(digest: bytes, data: bytes, *, verified: bool = False) -> None:
            await asyncio.sleep(0.5)
            await put(digest, data, verified=verified)

        monkeypatch.setattr(relay.relay.intake, "put", slow_put)
        upstream.publish(1)
        await wait_until(lambda: held(relay.relay) == [1])
        assert upstream.blobs.calls == 2, "one for each blob"


async def test_what_was_asked_for_has_its_turn_before_the_next_newest(tmp_path: Path) -> None:
    upstream = LineUpstream(Line(4, sizes=SMALL), 0)
    async with following(tmp_path, upstream) as relay:
        upstream.blobs.open.clear()
        upstream.publish(2)
        await wait_until(lambda: relay.arriving() == {2})
        asked = relay.ask(1)
        for number in (3, 4):  # newer ones come, faster than the link is
            upstream.publish(number)
        await asked
        assert 1 in relay.arriving()
        upstream.blobs.open.set()
        await wait_until(lambda: {1, 4} <= set(held(relay.relay)))
        assert upstream.asked == [2, 1, 4]


async def test_what_was_asked_for_is_not_given_up_before_its_reader_is_known(tmp_path: Path) -> None:
    upstream = LineUpstream(Line(3, sizes=SMALL), 1)
    async with following(tmp_path, upstream) as relay:
        upstream.blobs.open.clear()
        await relay.ask(1)
        upstream.publish(3)
        await wait_until(upstream.news.empty)
        request = PathRequest(run_id="run", policy="policy", version=1, holder=Holder(name="reader"))
        assert await relay.ask(1) == 1
        relay.holders.told(request, 1)
        upstream.blobs.open.set()
        await wait_until(lambda: held(relay.relay) == [1, 3])
        assert upstream.asked == [1, 3]


async def test_a_number_that_is_not_there_disturbs_no_arrival(tmp_path: Path) -> None:
    upstream = LineUpstream(Line(2, sizes=SMALL), 0)
    async with following(tmp_path, upstream) as relay:
        upstream.blobs.open.clear()
        upstream.publish(1)
        await wait_until(lambda: relay.arriving() == {1})
        with pytest.raises(VersionUnavailable):
            await asyncio.wait_for(relay.ask(99), 2.0)
        upstream.blobs.open.set()
        await wait_until(lambda: held(relay.relay) == [1])
        assert upstream.asked == [1]


def unequal() -> Line:
    """Three versions, of which the second alone is large."""
    line, large = Line(3, sizes=SMALL), Line(2, sizes={"w": ("U8", "|u1", 400_000)}, seed=5)
    line.versions[1] = large[2]
    return line


async def test_a_version_that_finds_no_room_is_refused_to_who_asked_and_keeps_no_newer_one_away(tmp_path: Path) -> None:
    upstream = LineUpstream(unequal(), 0)
    async with following(tmp_path, upstream, run_quota_bytes=300_000) as relay:
        upstream.publish(1)
        await wait_until(lambda: held(relay.relay) == [1])
        upstream.publish(2)
        await wait_until(lambda: 2 in upstream.asked)
        with pytest.raises(NoCapacity, match="--run-quota-bytes"):
            await relay.ask(2)
        upstream.publish(3)
        await wait_until(lambda: 3 in held(relay.relay))
        with pytest.raises(NoCapacity, match="--run-quota-bytes"):
            await relay.ask(2)


async def test_the_newest_that_finds_no_room_keeps_nothing_away_that_is_asked_for(tmp_path: Path) -> None:
    upstream = LineUpstream(unequal(), 1)
    async with following(tmp_path, upstream, run_quota_bytes=300_000) as relay:
        upstream.publish(2)
        await wait_until(lambda: 2 in upstream.asked)
        await relay.ask(1)
        await wait_until(lambda: held(relay.relay) == [1])


async def test_what_nobody_waits_for_any_more_lets_a_newer_version_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription, "_GRACE_S", 0.1)
    line = Line(3, sizes=SMALL)
    upstream = LineUpstream(line, 2)
    upstream.broken = {2}
    async with following(tmp_path, upstream) as relay:
        asked = relay.ask(2)
        await wait_until(lambda: 2 in upstream.asked)
        upstream.publish(3)
        asked.cancel()
        await wait_until(lambda: held(relay.relay) == [3])


async def test_an_older_version_that_the_upstream_has_let_go_is_said_not_to_be_there_at_once(tmp_path: Path) -> None:
    upstream = LineUpstream(Line(3, sizes=SMALL), 0)
    upstream.gone = {1}
    async with following(tmp_path, upstream) as relay:
        upstream.blobs.open.clear()
        upstream.publish(3)
        await wait_until(lambda: relay.arriving() == {3})
        with pytest.raises(VersionUnavailable):
            await asyncio.wait_for(relay.ask(1), 2.0)
        assert upstream.asked == [3]
