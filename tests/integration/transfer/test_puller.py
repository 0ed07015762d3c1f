"""From whatever is there to the wanted version, for the bytes that its way costs."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ebbtide.errors import ChunkCorrupt, InvalidRequest, PermissionDenied, VersionUnavailable
from ebbtide.transfer import BlobCache, ElementChanges, Mirror
from ebbtide.types.weights import FetchPath, Patch, TensorPatch
from ebbtide.weights import Signer, places, places_of, seal_patch
from tests.integration.transfer.conftest import needed
from tests.support.waiting import wait_until
from tests.unit.transfer.filling import assert_right, bring, content
from tests.unit.weights.chain import Link, whole

FIRST = FetchPath(start=1, keyframe=True)
ALONG = FetchPath(start=1, keyframe=True, via=(2, 3, 4, 5))
NEWEST = FetchPath(start=5, keyframe=True)


@pytest.fixture
def mirror(links: list[Link]) -> Mirror:
    return Mirror(links[0].manifest, None)


async def pull(puller: Any, mirror: Mirror, link: Link, **options: Any) -> Any:
    version = link.manifest.version
    manifest = await puller.manifest("run", "policy", version.version)
    async with mirror.hold():
        return await puller.pull("run", version, mirror, manifest, **options)


async def test_a_late_joiner_takes_the_cheapest_path(
    links: list[Link], mirror: Mirror, serve: Any, pullers: Any
) -> None:
    relay = await serve(links)
    relay.script.ways = [NEWEST, ALONG]
    done = await pull(pullers(relay), mirror, links[4])
    assert_right(mirror, links[4])
    assert done.bytes_by_source == {"weight-relay": needed(links, NEWEST)}
    assert (done.tiles, done.reused) == (len(mirror.held()), 0)
    assert done.ways == (NEWEST,)
    assert [(list(ask.have), ask.done) for ask in relay.script.asked] == [([], False), ([5], True)]


async def test_who_follows_takes_patches_alone(links: list[Link], mirror: Mirror, serve: Any, pullers: Any) -> None:
    relay = await serve(links)
    puller = pullers(relay)
    relay.script.ways = [FIRST]
    await pull(puller, mirror, links[0])
    for number in (2, 4):
        way = FetchPath(
            start=number - 1 if number == 2 else 2, keyframe=False, via=tuple(range(number // 2 + 1, number + 1))
        )
        relay.script.ways = [way]
        done = await pull(puller, mirror, links[number - 1])
        assert_right(mirror, links[number - 1])
        assert done.bytes == needed(links, way)
        assert done.tiles + done.reused == len(mirror.held())
    assert [list(ask.have) for ask in relay.script.asked if not ask.done] == [[], [1], [2]]


async def test_what_is_there_already_costs_nothing(links: list[Link], mirror: Mirror, serve: Any, pullers: Any) -> None:
    relay = await serve(links)
    relay.script.ways = [NEWEST]
    bring(mirror, links, 5)
    done = await pull(pullers(relay), mirror, links[4])
    assert (done.bytes, done.tiles, relay.script.fetched) == (0, 0, [])


async def test_a_mirror_whose_tiles_are_of_two_versions_goes_two_paths(
    links: list[Link], mirror: Mirror, serve: Any, pullers: Any
) -> None:
    from tests.unit.transfer.filling import blobs_of, tasks_to

    bring(mirror, links, 2)
    for task in tasks_to(mirror, links, 4)[::2]:
        mirror.apply(task, blobs_of(links))
    mirror.remember("run", "policy", [2, 4])
    relay = await serve(links)
    relay.script.ways = [
        FetchPath(start=4, keyframe=False, via=(5,)),
        FetchPath(start=2, keyframe=False, via=(3, 4, 5)),
    ]
    await pull(pullers(relay), mirror, links[4])
    assert_right(mirror, links[4])
    assert list(relay.script.asked[0].have) == [2, 4]
    dense = {digest for entry in links[1].manifest.tensors for digest in entry.digests}
    assert not dense & set(relay.script.fetched)


async def test_what_no_way_reaches_is_asked_for_from_keyframes(
    links: list[Link], mirror: Mirror, serve: Any, pullers: Any
) -> None:
    bring(mirror, links, 4)
    mirror.remember("run", "policy", [4])
    with mirror.path.open("r+b") as file:  # and one tile is damaged
        file.seek(-1, 2)
        file.write(b"?")
    mirror.mend(list(places(links[0].manifest)))
    relay = await serve(links)
    relay.script.ways = [FetchPath(start=4, keyframe=False, via=(5,))]
    relay.script.scratch_paths = [NEWEST]
    done = await pull(pullers(relay), mirror, links[4])
    assert_right(mirror, links[4])
    assert [ask.scratch for ask in relay.script.asked] == [False, True, False]
    assert done.bytes < needed(links, NEWEST)
    relay.script.ways, relay.script.scratch_paths = [], []
    with pytest.raises(VersionUnavailable, match="no way"):
        await pull(pullers(relay), mirror, links[3])


async def test_damage_that_nobody_noticed_is_found_and_repaired(
    links: list[Link], mirror: Mirror, serve: Any, pullers: Any
) -> None:
    bring(mirror, links, 4)
    mirror.remember("run", "policy", [4])
    changed = next(place for place in places(links[0].manifest) if _sizes(links[4], place[0])[place[1]])
    mirror.layout.write(mirror._file, *changed, mirror.layout.read(mirror._file, *changed) ^ np.uint8(1))
    relay = await serve(links)
    relay.script.ways = [FetchPath(start=4, keyframe=False, via=(5,))]
    relay.script.scratch_paths = [NEWEST]
    await pull(pullers(relay), mirror, links[4])
    assert_right(mirror, links[4])


def _sizes(link: Link, tensor: int) -> tuple[int, ...]:
    assert link.patch is not None
    return link.patch.tensors[tensor].sizes


async def test_patches_that_lie_are_given_up_for_dense_tiles(
    links: list[Link], mirror: Mirror, serve: Any, pullers: Any
) -> None:
    """The lists are well made and the blobs are what the lists say; only what comes out is another version."""

    def forged(patch: Patch) -> Patch:
        tensors = tuple(TensorPatch(sizes=(0,) * len(one.sizes), digests=()) for one in patch.tensors)
        return seal_patch(msgspec.structs.replace(patch, tensors=tensors))

    bring(mirror, links, 4)
    mirror.remember("run", "policy", [4])
    relay = await serve(links)
    relay.script.patch = forged
    relay.script.ways = [FetchPath(start=4, keyframe=False, via=(5,))]
    relay.script.scratch_paths = [NEWEST]
    done = await pull(pullers(relay), mirror, links[4])
    assert_right(mirror, links[4])
    assert done.bytes
    relay.script.scratch_paths = []
    bring(mirror, links, 4)
    mirror.remember("run", "policy", [4])
    with pytest.raises(ChunkCorrupt):
        await pull(pullers(relay, patience_s=0.3), mirror, links[4])
    assert_right(mirror, links[3])


async def test_slices_alone_are_fetched_when_slices_are_wanted(
    links: list[Link], mirror: Mirror, serve: Any, pullers: Any
) -> None:
    relay = await serve(links)
    relay.script.ways = [NEWEST]
    wanted = places_of(links[0].manifest, {"brain": [((0, 3), (0, 11))], "eight": [((0, 9), (10, 20))]})
    done = await pull(pullers(relay), mirror, links[4], wanted=wanted)
    assert set(mirror.held()) == set(wanted)
    assert done.tiles == len(wanted)
    assert not mirror.holds(links[4].manifest)
    assert not any(ask.done for ask in relay.script.asked)
    assert content(mirror)["brain"][:66] == whole(links[4])["brain"][:66]
    await pull(pullers(relay), mirror, links[4])
    assert_right(mirror, links[4])


async def test_changes_are_collected_on_the_way(
    links: list[Link], mirror: Mirror, serve: Any, pullers: Any, tmp_path: Path
) -> None:
    from tests.unit.transfer.test_mirror import changed

    bring(mirror, links, 3)
    mirror.remember("run", "policy", [3])
    relay = await serve(links)
    relay.script.ways = [FetchPath(start=3, keyframe=False, via=(4, 5))]
    changes = ElementChanges(links[0].manifest, share=1.0)
    await pull(pullers(relay), mirror, links[4], changes=changes)
    changes.write(tmp_path / "changes")
    assert changed(whole(links[2]), tmp_path / "changes") == whole(links[4])


async def test_each_blob_comes_once_however_many_tiles_want_it(serve: Any, pullers: Any) -> None:
    from ebbtide.weights import named_tensor
    from tests.unit.weights.chain import link

    zeros = tuple(named_tensor(name, np.zeros(1 << 21, "u1")) for name in "abcdefgh")
    one = link(1, zeros, None, 1 << 20)
    relay = await serve([one])
    relay.script.ways = [FIRST]
    mirror = Mirror(one.manifest, None)
    done = await pull(pullers(relay), mirror, one)
    assert mirror.holds(one.manifest)
    assert len(relay.script.fetched) == 1
    assert (done.tiles, done.bytes) == (16, 1 << 20)


async def test_peers_are_served_while_the_rest_is_still_coming(big: list[Link], serve: Any, pullers: Any) -> None:
    relay = await serve(big)
    relay.script.ways, relay.script.gate_after = [FIRST], 12
    cache, mirror = BlobCache(1 << 20), Mirror(big[0].manifest, None)
    puller = pullers(relay, cache, silence_s=60.0, streams=1)
    pulling = asyncio.create_task(pull(puller, mirror, big[0]))
    await wait_until(lambda: relay.script.asked, what="the relay to know of us")
    digests = [digest for entry in big[0].manifest.tensors for digest in entry.digests]

    async def served(digest: bytes) -> bytes | None:
        return cache.get(digest) or mirror.read(digest) or await cache.wait(digest, 10.0) or mirror.read(digest)

    for digest in digests[:8]:
        assert await served(digest) == big[0].blobs[digest]
    waiting = [asyncio.create_task(served(digest)) for digest in digests]
    await wait_until(lambda: len(cache._waiting) >= 8)
    relay.script.gate.set()
    assert await asyncio.gather(*waiting) == [big[0].blobs[digest] for digest in digests]
    await pulling


async def test_patch_blobs_are_kept_for_peers(big: list[Link], serve: Any, pullers: Any) -> None:
    relay = await serve(big)
    mirror, cache = Mirror(big[0].manifest, None), BlobCache(8 << 20)
    bring(mirror, big, 1)
    mirror.remember("run", "policy", [1])
    relay.script.ways = [FetchPath(start=1, keyframe=False, via=(2,))]
    done = await pull(pullers(relay, cache), mirror, big[1])
    assert big[1].patch is not None
    assert done.bytes == cache.size == big[1].patch.size
    relay.script.fetched.clear()
    bring(mirror, big, 1)
    mirror.remember("run", "policy", [1])
    await pull(pullers(relay, cache), mirror, big[1])
    assert not relay.script.fetched, "what is in the cache is not fetched again"
    assert_right(mirror, big[1])


# -- trust -------------------------------------------------------------------------------------------------------


async def test_manifests_of_others_are_refused(links: list[Link], serve: Any, pullers: Any) -> None:
    signer, other = Signer(bytes(32)), Signer(b"x" * 32)
    relay = await serve(links)
    puller = pullers(relay)
    with pytest.raises(PermissionDenied, match="another key"):
        await puller.manifest("run", "policy", 5, publisher=signer.public)
    signed = {link.manifest.version.version: link for link in links}
    relay.script.links = {
        number: msgspec.structs.replace(link, manifest=signer.sign(link.manifest)) for number, link in signed.items()
    }
    assert (await puller.manifest("run", "policy", 5, publisher=signer.public)).version.version == 5
    assert (await puller.manifest("run", "policy", 0, publisher=signer.public)).version.version == 5
    with pytest.raises(PermissionDenied):
        await puller.manifest("run", "policy", 5, publisher=other.public)
    with pytest.raises(InvalidRequest, match="announced"):
        await puller.manifest("run", "policy", 5, root=bytes(32))
    with pytest.raises(ChunkCorrupt, match="another version"):
        await pullers(relay, patience_s=0.0).manifest("another-run", "policy", 5)


async def test_a_start_that_nobody_signed_is_no_start(
    links: list[Link], mirror: Mirror, serve: Any, pullers: Any
) -> None:
    signer = Signer(bytes(32))
    relay = await serve(links)
    relay.script.links[5] = msgspec.structs.replace(links[4], manifest=signer.sign(links[4].manifest))
    relay.script.ways = [FetchPath(start=4, keyframe=True, via=(5,))]
    puller = pullers(relay)
    manifest = await puller.manifest("run", "policy", 5, publisher=signer.public)
    with pytest.raises(PermissionDenied):
        await puller.pull("run", manifest.version, mirror, manifest, publisher=signer.public)


async def test_another_manifest_than_the_announced_versions_is_refused(
    links: list[Link], mirror: Mirror, serve: Any, pullers: Any
) -> None:
    puller = pullers(await serve(links))
    with pytest.raises(InvalidRequest, match="announced"):
        await puller.pull("run", links[3].manifest.version, mirror, links[4].manifest)
