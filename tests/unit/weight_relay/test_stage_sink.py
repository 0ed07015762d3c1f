"""Blobs of several versions on their way here: each version is committed as soon as it is whole, bases first."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ebbtide.errors import Unavailable
from ebbtide.transfer.blob_fetcher import BlobBatch
from ebbtide.weight_relay.service import WeightRelay
from ebbtide.weight_relay.subscription import ArrivalStep, StageSink
from tests.integration.weight_relay.lines import Line
from tests.unit.weight_relay.relays import SMALL, held, relay_at

NONE = BlobBatch({})


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[WeightRelay]:
    relay = relay_at(tmp_path)
    await relay.open()
    yield relay
    await relay.close()


async def staged(relay: WeightRelay, line: Line) -> StageSink:
    """Versions 1, dense, and 2, a patch on it."""
    steps: list[ArrivalStep] = [(line[1].manifest, None), (line[2].manifest, line[2].patch)]
    return StageSink(
        relay.intake,
        [(step, await relay.intake.begin(*step, arriving=True)) for step in steps],
    )


async def test_a_version_is_committed_with_its_last_blob(relay: WeightRelay) -> None:
    line = Line(2, sizes=SMALL)
    sink = await staged(relay, line)
    first, second = line[1].tiles.items()
    await sink.take(NONE, dict([first]), "peer")
    assert held(relay) == []
    await sink.take(NONE, dict([second]), "peer")
    assert held(relay) == [1]
    await sink.take(NONE, dict(line[2].blobs), "peer")
    assert held(relay) == [1, 2]


async def test_a_version_that_is_whole_before_its_base_is_committed_after_it(relay: WeightRelay) -> None:
    line = Line(2, sizes=SMALL)
    sink = await staged(relay, line)
    await sink.take(NONE, dict(line[2].blobs), "peer")
    assert held(relay) == []
    await sink.take(NONE, dict(line[1].tiles), "peer")
    assert held(relay) == [1, 2]


async def test_a_stage_that_has_gone_is_worth_another_try(relay: WeightRelay) -> None:
    line = Line(2, sizes=SMALL)
    sink = await staged(relay, line)
    await relay.intake.abandon("run", "policy", 1)
    with pytest.raises(Unavailable, match="the stage has gone"):
        await sink.take(NONE, dict(line[1].tiles), "peer")
