"""Versions come by patches from a real relay, whatever a worker has, and an engine reads exactly theirs."""

from typing import Any

import pytest

from tests.fakes.scripted_engine import ScriptedEngine
from tests.integration.rollout_worker.reading import Reads, pulled
from tests.unit.weights.chain import Link, chain, whole

House = Any  # the fixtures' classes live in conftest.py and relays.py
LiveRelay = Any


async def install(house: House, live: LiveRelay, link: Link, count: int) -> Any:
    """Have a version installed, as the install number `count`."""
    house.coordinator.install(link.manifest.version, "run", live.signer.public)
    return await house.coordinator.hear("installed", count)


def dense(link: Link) -> int:
    return sum(len(data) for data in whole(link).values())


async def test_each_version_comes_by_its_patch_and_is_read_exactly(house: House, live: LiveRelay, reads: Reads) -> None:
    await house.worker(version=0, relay=live.way.address)
    links = chain(5)
    for number, link in enumerate(links, 1):
        await live.publish(link)
        before = pulled()
        await install(house, live, link, number)
        assert reads[-1] == (number, whole(link))
        if link.patch is not None:
            assert pulled() - before == sum(len(link.blobs[digest]) for digest in blobs(link))


def blobs(link: Link) -> set[bytes]:
    assert link.patch is not None
    return {digest for tensor in link.patch.tensors for digest in tensor.digests}


async def test_a_late_joiner_gets_the_newest_version(house: House, live: LiveRelay, reads: Reads) -> None:
    links = chain(6)
    await live.publish(*links)
    await house.worker(version=0, relay=live.way.address)
    await install(house, live, links[-1], 1)
    assert reads == [(6, whole(links[-1]))]


async def test_a_rollback_is_an_install_like_any_other(house: House, live: LiveRelay, reads: Reads) -> None:
    links = chain(3)
    await live.publish(*links)
    await house.worker(version=0, relay=live.way.address)
    for count, number in enumerate((1, 3, 2, 1, 3), 1):
        await install(house, live, links[number - 1], count)
        assert reads[-1] == (number, whole(links[number - 1]))


async def test_an_engine_of_slices_is_brought_only_the_tiles_of_its_own(
    house: House, live: LiveRelay, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes = {"brain": (((0, 3), (0, 11)),), "rows": (((0, 10), (0, 4)),)}
    monkeypatch.setattr(ScriptedEngine, "boxes", property(lambda _: boxes), raising=False)
    links = chain(3)
    await live.publish(*links)
    await house.worker(version=0, relay=live.way.address)
    before = pulled()
    await install(house, live, links[-1], 1)
    version, tensors = reads[-1]
    exact = whole(links[-1])
    assert version == 3
    assert tensors["brain"][: 3 * 11 * 2] == exact["brain"][: 3 * 11 * 2]
    assert all(tensors["rows"][row * 32 :][:8] == exact["rows"][row * 32 :][:8] for row in range(10))
    assert tensors["eight"] != exact["eight"]
    assert 0 < pulled() - before < dense(links[-1])
