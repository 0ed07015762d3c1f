"""A near source that hardly sends is left for a farther one that does, and for no other."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from ebbtide.transfer.sources import OpenSource
from tests.unit.transfer.test_pool import Scene, source

KIB = 1 << 10
MIB = 1 << 20


class Clock:
    """The time of the event loop and of the pool, which goes on only as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self._patch = monkeypatch
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    async def read(self, found: OpenSource, size: int, seconds: float, *, blobs: int = 10, rest_s: float = 0.0) -> None:
        """Have so many bytes come in as many seconds; `rest_s` more go by while nobody waits for them."""
        async with found.patience(5.0, MIB) as clock:
            for _ in range(blobs):
                self.now += seconds / blobs
                found.heard(size // blobs)
                with found.resting(clock):
                    self.now += rest_s / blobs


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Clock]:
    yield Clock(monkeypatch)
    monkeypatch.undo()


async def test_a_near_source_that_trickles_is_passed_over_for_a_while(clock: Clock) -> None:
    scene = Scene(source("far"), source("near", site="here"))
    near = scene.pool.pick()
    await clock.read(near, 100 * KIB, 4.0)
    assert not scene.pool.lags(near), "not for long enough"
    await clock.read(near, 100 * KIB, 4.0)
    assert scene.pool.lags(near)
    assert scene.pool.lags(near), "its other streams end, too"
    assert scene.pool.busy_s() == 0.0
    assert scene.picked(2) == ["far", "far"]
    clock.now += 31.0
    assert scene.picked(1) == ["near"]
    assert not scene.pool.lags(near), "it is judged again"


async def test_the_relay_takes_over_from_a_lone_slow_peer_though_it_was_not_listed(clock: Clock) -> None:
    scene = Scene(source("near", site="here"))
    near = scene.pool.pick()
    await clock.read(near, 10 * KIB, 6.0)
    assert scene.pool.lags(near)
    assert scene.picked(1) == ["weight-relay"]


async def test_who_is_all_there_is_may_be_slow(clock: Clock) -> None:
    scene = Scene(source("near", site="here"))
    near = scene.pool.pick()
    await clock.read(near, 10 * KIB, 6.0)
    assert not scene.pool.lags(near, {"relay:1"})
    assert scene.pool.lags(near)
    await clock.read(scene.relay, 10 * KIB, 6.0)
    assert not scene.pool.lags(scene.relay), "the other one was slow as well"


async def test_a_source_far_slower_than_what_comes_from_farther_is_left(clock: Clock) -> None:
    scene = Scene(source("far"), source("near", site="here"))
    near = scene.pool.pick()
    far = scene.pool._ready(scene.pool._listed[0])
    assert far is not None
    await clock.read(far, 80 * MIB, 2.0)
    await clock.read(near, 30 * MIB, 6.0)
    assert not scene.pool.lags(near), "an eighth of it is enough"
    await clock.read(near, 20 * MIB, 6.0)
    assert scene.pool.lags(near)


async def test_what_came_from_far_in_pulls_before_is_remembered(clock: Clock) -> None:
    first = Scene(source("far"))
    await clock.read(first.pool.pick(), 80 * MIB, 2.0)
    await first.pool.close()
    for rates, slow in ((first.pool._rates, True), ({}, False)):
        scene = Scene(source("far"), source("near", site="here"), rates=rates)
        near = scene.pool.pick()
        await clock.read(near, 20 * MIB, 6.0)
        assert scene.pool.lags(near) == slow


async def test_what_is_nearer_is_no_measure_for_what_is_far(clock: Clock) -> None:
    scene = Scene(source("site", site="here"), source("host", site="here", host="mine"))
    host = scene.pool.pick()
    await clock.read(host, 1000 * MIB, 2.0)
    site = scene.pool.pick({host.address})
    await clock.read(site, 6 * MIB, 6.0)
    assert not scene.pool.lags(site, {host.address})


async def test_what_a_reader_does_meanwhile_makes_no_source_slow(clock: Clock) -> None:
    scene = Scene(source("far"), source("near", site="here"))
    near = scene.pool.pick()
    await clock.read(near, 10 * MIB, 6.0, rest_s=1000.0)
    assert not scene.pool.lags(near)
