"""Manifests that are being sent take a bounded part of a relay's memory, for a bounded time."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from ebbtide.errors import NoCapacity, Unavailable
from ebbtide.testing import wait_until
from ebbtide.types.weights import Manifest
from ebbtide.weight_relay.joining import MAX_JOINED, Joining
from ebbtide.weights import Limits, ManifestPart, split_manifest
from tests.integration.weight_relay.lines import Line
from tests.unit.weight_relay.relays import SMALL


class Sending:
    """A publisher that stops amid its manifest until `rest` is set."""

    def __init__(self) -> None:
        self.manifest = Line(1, sizes=SMALL)[1].manifest
        self.rest = asyncio.Event()
        self.waiting = 0

    async def parts(self) -> AsyncIterator[ManifestPart]:
        for part in split_manifest(self.manifest):
            yield part
        self.waiting += 1
        await self.rest.wait()

    def begin(self, joining: Joining) -> "asyncio.Task[tuple[Manifest, object]]":
        return asyncio.create_task(joining.join(self.parts()))


async def test_beyond_a_number_of_manifests_publishers_are_told_to_come_later() -> None:
    joining, sending = Joining(Limits()), Sending()
    begun = [sending.begin(joining) for _ in range(MAX_JOINED)]
    await wait_until(lambda: sending.waiting == MAX_JOINED)
    with pytest.raises(NoCapacity, match="retry later"):
        await sending.begin(joining)
    sending.rest.set()
    assert [manifest for manifest, _ in await asyncio.gather(*begun)] == [sending.manifest] * MAX_JOINED
    assert (await sending.begin(joining))[0] == sending.manifest


async def test_a_manifest_that_does_not_end_is_given_up() -> None:
    joining, sending = Joining(Limits(), patience_s=0.05), Sending()
    for _ in range(MAX_JOINED + 1):
        with pytest.raises(Unavailable, match="begin again"):
            await asyncio.wait_for(sending.begin(joining), 5.0)
