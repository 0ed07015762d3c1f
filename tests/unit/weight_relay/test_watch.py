"""Watchers of versions, and versions that go while they are told."""

from pathlib import Path

import numpy as np

from ebbtide.types.weights import PolicyVersion
from ebbtide.weight_relay.service import WeightRelay
from ebbtide.weight_relay.settings import RelaySettings
from ebbtide.weights import build_manifest, named_tensor, slice_tiles, tile_digest
from tests.integration.weight_relay.lines import SIGNER


async def publish(relay: WeightRelay, number: int) -> None:
    tensor = named_tensor("weight", np.full(4, number, dtype=np.float32))
    manifest = SIGNER.sign(build_manifest("run", PolicyVersion(policy="policy", version=number), [tensor]))
    await relay.intake.begin(manifest)
    for tile in slice_tiles(tensor, manifest.tile_bytes):
        await relay.intake.put(tile_digest(tile), bytes(tile))
    await relay.intake.commit("run", manifest.version)


async def test_a_version_let_go_while_its_watcher_reads_does_not_end_the_watch(tmp_path: Path) -> None:
    relay = WeightRelay(RelaySettings(data_dir=str(tmp_path), keep_versions=2))
    await relay.open()
    for number in (1, 2):
        await publish(relay, number)
    versions = relay.reader.watch("run", "policy")
    told = [(await anext(versions)).version.version]
    for number in (3, 4):  # the first two are let go before the watcher reads on
        await publish(relay, number)
    told += [(await anext(versions)).version.version for _ in range(3)]
    assert told == [1, 2, 3, 4]
    await relay.close()
