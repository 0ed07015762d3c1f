"""What the budget counts: whole disk blocks, and the files of versions and of publishers' keys too."""

from pathlib import Path

import pytest

from ebbtide.errors import NoCapacity
from ebbtide.types.weights import PolicyVersion, TensorEntry
from ebbtide.weight_relay.intake.version_intake import MAX_STAGES, MAX_STAGES_OF_RUN
from ebbtide.weight_relay.library.version_index import BLOCK
from ebbtide.weight_relay.service import WeightRelay
from ebbtide.weights import seal_manifest
from tests.fakes.clocks import SetClock
from tests.integration.weight_relay.lines import SIGNER, Line
from tests.unit.weight_relay.relays import SMALL, publish, relay_at

BUDGET = 1 << 20


async def opened(folder: Path) -> WeightRelay:
    relay = relay_at(folder, budget_bytes=BUDGET, keep_versions=9)
    await relay.open()
    return relay


async def publish_nothing(relay: WeightRelay, run_id: str) -> None:
    """A version of one empty tensor, signed."""
    entry = TensorEntry(name="empty", dtype="BF16", shape=(0,), size=0, digests=())
    manifest = SIGNER.sign(seal_manifest(run_id, PolicyVersion(policy="policy", version=1), [entry], 1 << 20))
    assert await relay.intake.begin(manifest) == []
    await relay.intake.commit(run_id, manifest.version)


async def test_versions_without_a_blob_take_room_with_their_files_and_keys(tmp_path: Path) -> None:
    relay = await opened(tmp_path)
    for number in range(BUDGET // (2 * BLOCK)):
        await publish_nothing(relay, f"run-{number}")
    with pytest.raises(NoCapacity, match="--budget-bytes"):
        await publish_nothing(relay, "one-more")
    await relay.close()
    relay = await opened(tmp_path)
    with pytest.raises(NoCapacity):
        await publish_nothing(relay, "another")
    await relay.close()


async def test_small_tiles_take_whole_blocks_of_the_budget(tmp_path: Path) -> None:
    relay = await opened(tmp_path)
    tiles = BUDGET // BLOCK
    few = Line(1, sizes={"w": ("U8", "|u1", 4 * (tiles - 10))}, tile_bytes=4)
    many = Line(1, sizes={"w": ("U8", "|u1", 4 * tiles)}, tile_bytes=4, run_id="many")
    with pytest.raises(NoCapacity, match="--budget-bytes"):
        await relay.intake.begin(many[1].manifest)
    await publish(relay, few[1])
    await relay.close()


async def test_what_the_budget_counts_is_given_back_when_it_goes(tmp_path: Path) -> None:
    relay = relay_at(tmp_path, keep_versions=1, keyframe_every=99, keyframe_share=99.0)
    await relay.open()
    line, counted = Line(6, sizes=SMALL), []
    for version in line:
        await publish(relay, version, whole=True)
        counted.append(relay.library.index.bytes)
    assert min(counted) == max(counted)
    await relay.close()


async def test_a_trainer_that_dies_again_and_again_is_not_kept_waiting_by_what_it_left(tmp_path: Path) -> None:
    relay = relay_at(tmp_path, clock := SetClock())
    await relay.open()
    line = Line(MAX_STAGES + 1, sizes=SMALL)
    for version in line.versions:
        clock.now += 1.0
        await relay.intake.begin(version.manifest)
        await relay.intake.begin(version.manifest)  # the same one is no other
    left = [version.manifest.version for version in line.versions[-MAX_STAGES_OF_RUN:]]
    assert [stage.manifest.version for stage in relay.library.index.stages] == left
    assert await relay.intake.begin(Line(1, sizes=SMALL, run_id="other")[1].manifest)
    await relay.close()


async def test_where_all_stages_are_taken_a_silent_publisher_gives_way(tmp_path: Path) -> None:
    clock = SetClock()
    relay = relay_at(tmp_path, clock)
    await relay.open()
    lines = [Line(1, sizes=SMALL, run_id=f"run-{number}", seed=number) for number in range(MAX_STAGES + 2)]
    for line in lines[:MAX_STAGES]:
        await relay.intake.begin(line[1].manifest)
    with pytest.raises(NoCapacity, match="retry later"):
        await relay.intake.begin(lines[-1][1].manifest)
    clock.now += 61.0
    digest, tile = next(iter(lines[0][1].tiles.items()))
    await relay.intake.put(digest, tile)  # this one is not silent
    await relay.intake.begin(lines[-1][1].manifest)
    assert {stage.stream[0] for stage in relay.library.index.stages} == {
        line[1].manifest.run_id for line in (lines[0], *lines[2:MAX_STAGES], lines[-1])
    }
    await relay.close()
