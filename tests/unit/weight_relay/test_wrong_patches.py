"""Keyframes whose making finds a patch that is wrong, or a version that goes meanwhile."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ebbtide.types.weights import Manifest, Patch, TensorPatch
from ebbtide.weight_relay.library.version_index import PatchEdge
from ebbtide.weight_relay.retention import RetentionPlan
from ebbtide.weight_relay.service import WeightRelay
from ebbtide.weights import blob_sizes, seal_patch
from tests.integration.weight_relay.lines import SIGNER, Line
from tests.support.waiting import wait_until
from tests.unit.weight_relay.relays import SMALL, held, keyframes, patches, publish_all, put, relay_at

STREAM = "run", "policy"


async def opened(folder: Path, *, keyframe_every: int = 99) -> WeightRelay:
    relay = relay_at(folder, keep_versions=9, keyframe_every=keyframe_every, keyframe_share=99.0)
    await relay.open()
    return relay


def lead(relay: WeightRelay, patch: Patch, blobs: Mapping[bytes, bytes], *, composed: bool) -> None:
    """Have the relay hold a patch, be it right or not."""
    library, ends = relay.library, (patch.base.version, patch.version.version)
    if ends in relay.library.index.patches(STREAM):
        library.disk.drop_patch(STREAM, ends)
        relay.library.index.cut(STREAM, ends)
    for digest, data in blobs.items():
        library.disk.put_tile(digest, data)
        library.stored(digest, len(data))
    library.disk.put_patch(patch, composed=composed)
    relay.library.index.connect(PatchEdge(patch=patch, blobs=blob_sizes(patch), composed=composed, used_at=0.0))


def between(base: Manifest, target: Manifest, tensors: tuple[TensorPatch, ...]) -> Patch:
    made = Patch(run_id="run", base=base.version, version=target.version, tensors=tensors, changed=1, elements=23_000)
    return seal_patch(made)


async def test_a_composed_patch_that_is_wrong_goes_and_its_version_stays(tmp_path: Path) -> None:
    relay, line = await opened(tmp_path), Line(5, sizes=SMALL)
    await publish_all(relay, line)
    assert line[2].patch is not None
    lead(relay, between(line[1].manifest, line[5].manifest, line[2].patch.tensors), {}, composed=True)
    await relay.close()
    relay = await opened(tmp_path, keyframe_every=1)
    await wait_until(lambda: keyframes(relay) == [1, 5] or held(relay) != [1, 2, 3, 4, 5], what="the keyframe")
    assert held(relay) == [1, 2, 3, 4, 5]
    assert patches(relay) == [(1, 2), (2, 3), (3, 4), (4, 5)]
    for digest, tile in line[5].tiles.items():
        assert await relay.reader.tile(digest) == tile
    await relay.close()


async def test_a_published_patch_that_is_wrong_takes_no_version_along_to_which_another_leads(tmp_path: Path) -> None:
    relay, line = await opened(tmp_path), Line(3, sizes=SMALL)
    await publish_all(relay, line)
    assert line[2].patch is not None
    assert line[3].patch is not None
    wrong = msgspec.structs.replace(line[3].patch, tensors=line[2].patch.tensors)
    lead(relay, SIGNER.sign_patch(seal_patch(wrong)), {}, composed=False)
    dense = tuple(
        TensorPatch(sizes=tuple(len(line[3].tiles[digest]) for digest in entry.digests), digests=entry.digests)
        for entry in line[3].manifest.tensors
    )
    lead(relay, between(line[1].manifest, line[3].manifest, dense), line[3].tiles, composed=True)
    await relay.close()
    relay = await opened(tmp_path, keyframe_every=1)
    await wait_until(lambda: keyframes(relay) == [1, 3] or held(relay) != [1, 2, 3], what="the keyframe")
    assert held(relay) == [1, 2, 3]
    assert patches(relay) == [(1, 2), (1, 3)]
    await relay.close()


async def test_a_version_that_goes_while_its_keyframe_is_made_costs_no_other_keyframe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = await opened(tmp_path)
    for run_id in ("run", "other"):
        line = Line(2, sizes=SMALL, run_id=run_id)
        for version in line:
            await put(relay, version)
            await relay.intake.commit(run_id, version.manifest.version)
    await relay.close()
    relay = relay_at(tmp_path, keep_versions=9, keyframe_every=1)
    follow, gone = relay.collector.follow, set[Any]()

    async def loses_one(plan: RetentionPlan) -> None:
        await follow(plan)
        for making in [] if gone else list(relay.library.index.making):
            gone.add(making.stream)
            await relay.collector._remove(making.stream, 2)

    monkeypatch.setattr(relay.collector, "follow", loses_one)
    await relay.open()
    task = relay.keyframes._task
    assert task is not None
    await wait_until(task.done, what="the keyframes' rest")
    (first,) = gone
    (second,) = {("run", "policy"), ("other", "policy")} - gone
    assert sorted(relay.library.index.stream(first)) == [1]
    assert sorted(relay.library.index.keyframes(second)) == [1, 2]
    await relay.close()
