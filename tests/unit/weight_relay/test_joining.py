"""Manifests that are being sent take a bounded part of a relay's memory, for a bounded time, and no run takes all."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from ebbtide.errors import InvalidRequest, NoCapacity, Unavailable
from ebbtide.types.weights import Manifest
from ebbtide.weight_relay.intake.publishing import MAX_JOINED, MAX_JOINED_OF_RUN, JoinedPublish
from ebbtide.weights import ManifestLimits, ManifestPart, split_manifest
from tests.integration.weight_relay.lines import Line
from tests.support.waiting import wait_until
from tests.unit.weight_relay.relays import SMALL

RUNS = [f"run-{number // MAX_JOINED_OF_RUN}" for number in range(MAX_JOINED)]  # as few as may take all


class Sending:
    """A publisher that stops in the middle of its manifest, or before it, until `rest` is set."""

    def __init__(self, run_id: str = "run", *, silent: bool = False) -> None:
        self.manifest = Line(1, sizes=SMALL, run_id=run_id)[1].manifest
        self.rest = asyncio.Event()
        self.waiting = 0
        self._silent = silent

    async def parts(self) -> AsyncIterator[ManifestPart]:
        for part in () if self._silent else split_manifest(self.manifest):
            yield part
        self.waiting += 1
        await self.rest.wait()

    def begin(self, joining: JoinedPublish) -> "asyncio.Task[tuple[Manifest, object]]":
        return asyncio.create_task(joining.join(self.parts()))


async def test_beyond_a_number_of_manifests_publishers_are_told_to_come_later() -> None:
    joining, sendings = JoinedPublish(ManifestLimits()), [Sending(run_id) for run_id in RUNS]
    begun = [sending.begin(joining) for sending in sendings]
    await wait_until(lambda: all(sending.waiting for sending in sendings))
    with pytest.raises(NoCapacity, match=f"{MAX_JOINED} manifests are .* retry later"):
        await Sending("another").begin(joining)
    for sending in sendings:
        sending.rest.set()
    found = [manifest for manifest, _ in await asyncio.gather(*begun)]
    assert found == [sending.manifest for sending in sendings]
    assert (await sendings[0].begin(joining))[0] == sendings[0].manifest


async def test_a_run_that_sends_many_manifests_is_told_to_come_later_and_no_other_is() -> None:
    joining, greedy, other = JoinedPublish(ManifestLimits()), Sending("greedy"), Sending("other")
    begun = [greedy.begin(joining) for _ in range(MAX_JOINED_OF_RUN)]
    await wait_until(lambda: greedy.waiting == MAX_JOINED_OF_RUN)
    for _ in range(MAX_JOINED):
        with pytest.raises(NoCapacity, match=r"of the run are .* retry later"):
            await greedy.begin(joining)
    other.rest.set()
    assert (await other.begin(joining))[0] == other.manifest
    greedy.rest.set()
    await asyncio.gather(*begun)
    assert (await greedy.begin(joining))[0] == greedy.manifest


async def test_who_sends_nothing_takes_nobodys_place_and_is_given_up() -> None:
    joining, silent, other = JoinedPublish(ManifestLimits(), first_s=0.2), Sending(silent=True), Sending()
    begun = [silent.begin(joining) for _ in range(2 * MAX_JOINED)]
    await wait_until(lambda: silent.waiting == 2 * MAX_JOINED)
    other.rest.set()
    assert (await other.begin(joining))[0] == other.manifest
    for task in begun:
        with pytest.raises(Unavailable, match=r"first part .* begin again"):
            await asyncio.wait_for(task, 5.0)


async def test_no_part_at_all_is_no_manifest() -> None:
    silent = Sending(silent=True)
    silent.rest.set()
    with pytest.raises(InvalidRequest, match="no part of a manifest came"):
        await silent.begin(JoinedPublish(ManifestLimits()))


async def test_a_manifest_that_does_not_end_is_given_up() -> None:
    joining, sending = JoinedPublish(ManifestLimits(), patience_s=0.05), Sending()
    for _ in range(MAX_JOINED + 1):
        with pytest.raises(Unavailable, match="begin again"):
            await asyncio.wait_for(sending.begin(joining), 5.0)
