"""Patches of several steps: what they make, when they are made, and how they go."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY

from ebbtide.errors import VersionUnavailable
from ebbtide.types.weights import FetchPath
from ebbtide.weight_relay.service import WeightRelay
from ebbtide.weights import Planner, TileTask, Way, check_patch, places, tile_digest
from ebbtide.weights.patch import TileCodec
from ebbtide.weights.tensors import unit_width
from tests.integration.weight_relay.lines import Line, Version
from tests.support.waiting import wait_until
from tests.unit.weight_relay.relays import SMALL, held, patches, publish, publish_all, relay_at

SLOW, FAST = 1.0, 1e12


async def opened(folder: Path, **settings: Any) -> WeightRelay:
    relay = relay_at(folder, keep_versions=30, keyframe_every=99, keyframe_share=99.0, **settings)
    await relay.open()
    return relay


async def follow(relay: WeightRelay, found: FetchPath, base: Version, target: Version) -> None:
    """Bring the base's tiles to the target by the way's patches, and compare."""
    steps, number = [], found.start
    for via in found.via:
        patch = relay.reader.patch("run", "policy", number, via)
        check_patch(patch, relay.reader.manifest("run", "policy", via))
        steps.append(patch)
        number = via
    way = Way(start=base.manifest, patches=tuple(steps), keyframe=False)
    held = {(i, j): base.manifest.tensors[i].digests[j] for i, j in places(base.manifest)}
    for task in Planner(target.manifest, [way]).tasks(places(target.manifest), held):
        assert isinstance(task, TileTask)
        width = unit_width(target.manifest.tensors[task.place[0]].dtype)
        dense = await relay.reader.tile(task.dense) if task.dense else base.tiles[held[task.place]]
        tile = np.frombuffer(bytearray(dense), f"<u{width}")
        for digest in task.patches:
            TileCodec(width).apply(await relay.reader.tile(digest), tile)
        assert tile_digest(tile.tobytes()) == task.digest


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.02, 0.3, 0.8, 1.0])
async def test_a_composed_patch_makes_what_its_chain_makes(share: float, tmp_path: Path) -> None:
    line = Line(6, share=share, sizes={**SMALL, "tiny": ("F16", "<u2", 3), "wide": ("I64", "<u8", 500)})
    relay = await opened(tmp_path)
    await publish_all(relay, line)
    relay.composer._rate = 1e15  # as if it cost nothing
    for start, wanted in ((1, 6), (2, 4), (5, 6)):
        ways = await relay.reader.ways("run", "policy", wanted, [start], bytes_per_s=SLOW)
        await follow(relay, ways[-1], line[start], line[wanted])
        await follow(relay, ways[-1], line[start], line[wanted])
    await relay.close()


def composed() -> float:
    return REGISTRY.get_sample_value("ebbtide_relay_composed_patches_total") or 0.0


async def test_who_asks_at_once_shares_one_composition_and_who_gains_nothing_waits_for_none(tmp_path: Path) -> None:
    line, relay = Line(6, share=0.3, sizes=SMALL), await opened(tmp_path)
    await publish_all(relay, line)
    before = composed()
    assert [way.via for way in await relay.reader.ways("run", "policy", 6, [1], bytes_per_s=FAST)] == [(2, 3, 4, 5, 6)]
    answers = await asyncio.gather(
        *(relay.reader.ways("run", "policy", 6, [1], bytes_per_s=SLOW) for _ in range(8)),
    )
    assert all(found[0].via == (6,) for found in answers)
    assert composed() == before + 1
    assert [way.via for way in await relay.reader.ways("run", "policy", 6, [1], bytes_per_s=FAST)] == [(6,)]
    await relay.close()


async def test_a_composed_patch_makes_room_before_anything_that_was_published(tmp_path: Path) -> None:
    sizes = {"w": ("BF16", "<u2", 400_000)}
    line, relay = Line(7, share=0.05, sizes=sizes), await opened(tmp_path, budget_bytes=1_220_000)
    for version in list(line)[:5]:
        await publish(relay, version)
    await relay.reader.ways("run", "policy", 5, [1], bytes_per_s=SLOW)
    assert (1, 5) in patches(relay)
    published = [(number, number + 1) for number in range(1, 5)]
    other = Line(1, sizes={"w": ("U8", "|u1", 300_000)}, run_id="other", seed=3)
    for digest in await relay.intake.begin(other[1].manifest):
        await relay.intake.put(digest, other[1].tiles[digest])
    assert patches(relay) == published
    await relay.close()


async def test_no_patch_is_composed_where_room_lacks(tmp_path: Path) -> None:
    sizes = {"w": ("BF16", "<u2", 400_000)}
    line, relay = Line(5, share=0.05, sizes=sizes), await opened(tmp_path, run_quota_bytes=936_000)
    await publish_all(relay, line)
    assert [way.via for way in await relay.reader.ways("run", "policy", 5, [1], bytes_per_s=SLOW)] == [(2, 3, 4, 5)]
    await relay.close()


async def test_what_waits_for_its_turn_keeps_what_it_is_composed_of(tmp_path: Path) -> None:
    line, relay = (
        Line(4, share=0.3, sizes=SMALL),
        relay_at(tmp_path, keep_versions=1, keyframe_every=99, keyframe_share=99.0),
    )
    await relay.open()
    for number in (1, 2, 3):
        await publish(relay, line[number])
    before = composed()
    async with relay.composer._turn:
        asking = asyncio.create_task(relay.reader.ways("run", "policy", 3, [1], bytes_per_s=SLOW))
        await wait_until(lambda: relay.composer._tasks, what="a composition")
        await publish(relay, line[4], whole=True)
        assert held(relay) == [1, 2, 3, 4]
    with pytest.raises(VersionUnavailable):  # retention's turn came behind it
        await asking
    assert composed() == before + 1
    assert held(relay) == [4]
    await relay.close()


async def test_a_version_that_goes_before_its_patch_is_composed_is_no_fault(tmp_path: Path) -> None:
    line, relay = Line(3, share=0.3, sizes=SMALL), await opened(tmp_path)
    await publish_all(relay, line)
    async with relay.composer._turn:
        asking = asyncio.create_task(relay.reader.ways("run", "policy", 3, [1], bytes_per_s=SLOW))
        await wait_until(lambda: relay.composer._tasks, what="a composition")
        (task,) = relay.composer._tasks.values()
        relay.library.index.evict(("run", "policy"), 3)
    with pytest.raises(VersionUnavailable, match="no way leads"):
        await asking
    assert task.exception() is None
    await relay.close()
