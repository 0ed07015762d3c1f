"""A relay in the test's process, and publishers of lines of versions."""

from pathlib import Path
from typing import Any

from ebbtide.weight_relay.service import WeightRelay
from ebbtide.weight_relay.settings import RelaySettings
from tests.fakes.clocks import SetClock
from tests.integration.weight_relay.lines import Line, Version

#: One tile of bf16 and one of fp32.
SMALL = {"w": ("BF16", "<u2", 20_000), "b": ("F32", "<u4", 3_000)}


def relay_at(folder: Path, clock: SetClock | None = None, **settings: Any) -> WeightRelay:
    return WeightRelay(RelaySettings(data_dir=str(folder), **settings), clock=clock or SetClock())


async def put(relay: WeightRelay, version: Version, *, whole: bool = False, arriving: bool = False) -> None:
    """Stage a version and put its blobs."""
    patch = None if whole else version.patch
    blobs = version.blobs if patch else version.tiles
    for digest in await relay.intake.begin(version.manifest, patch, arriving=arriving):
        await relay.intake.put(digest, blobs[digest])


async def publish(relay: WeightRelay, version: Version, *, whole: bool = False) -> None:
    await put(relay, version, whole=whole)
    await relay.intake.commit("run", version.manifest.version)


async def publish_all(relay: WeightRelay, line: Line) -> None:
    for version in line:
        await publish(relay, version)


def held(relay: WeightRelay) -> list[int]:
    return sorted(relay.library.index.stream(("run", "policy")))


def keyframes(relay: WeightRelay) -> list[int]:
    return sorted(relay.library.index.keyframes(("run", "policy")))


def patches(relay: WeightRelay) -> list[tuple[int, int]]:
    return sorted(relay.library.index.patches(("run", "policy")))
