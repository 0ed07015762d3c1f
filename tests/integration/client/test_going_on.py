"""A publisher goes on from what the relay still lacks. It sends manifest and patch again only where it must."""

import asyncio
from itertools import repeat
from typing import Any

import pytest

from ebbtide.client import Client
from ebbtide.client.publisher import version_upload
from ebbtide.errors import ChunkCorrupt
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.weight_relay import servicer
from ebbtide.weight_relay.library.version_library import VersionLibrary
from ebbtide.weight_relay.servicer import RelayServicer
from ebbtide.weights.version_encoding import Encoding
from tests.integration.client.models import model, same, step
from tests.integration.client.reader import Reader


class Calls:
    """The publishers' calls of a relay."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun = self.puts = 0
        begin, put = RelayServicer.BeginPublish, RelayServicer.PutTiles

        async def begins(relay: RelayServicer, request: Any, context: Any) -> pb.BeginPublishResponse:
            self.begun += 1
            return await begin(relay, request, context)

        async def puts(relay: RelayServicer, request: Any, context: Any) -> pb.PutTilesResponse:
            self.puts += 1
            return await put(relay, request, context)

        patch.setattr(RelayServicer, "BeginPublish", begins)
        patch.setattr(RelayServicer, "PutTiles", puts)


@pytest.fixture(autouse=True)  # before the relay starts
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


async def publish_two(both: Client, reader: Reader) -> None:
    """A keyframe, and a patch to it."""
    first = model()
    for weights in (first, step(first)):
        async with both.claim("run") as lease:
            version = await lease.publish(weights, step=0)
        assert same(await reader.read(version.version), weights)


async def test_a_version_is_begun_once(both: Client, reader: Reader, calls: Calls) -> None:
    await publish_two(both, reader)
    assert (calls.begun, calls.puts) == (2, 2)


async def test_a_version_with_a_damaged_blob_is_begun_once(
    both: Client, reader: Reader, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob, spoilt = version_upload._blob, list[bytes]()

    def spoils_one(encoding: Encoding, digest: bytes) -> bytes:
        data = blob(encoding, digest)
        if spoilt:
            return data
        spoilt.append(digest)
        return bytes([data[0] ^ 1]) + data[1:]

    monkeypatch.setattr(version_upload, "_blob", spoils_one)
    async with both.claim("run") as lease:
        version = await lease.publish(model(), step=0)
    assert same(await reader.read(version.version), model())
    assert spoilt
    assert (calls.begun, calls.puts) == (1, 3)


async def test_a_blob_that_is_always_damaged_is_named(both: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_upload, "_blob", lambda encoding, digest: b"x")
    monkeypatch.setattr(version_upload, "pauses", lambda: repeat(0.01))
    async with both.claim("run") as lease:
        with pytest.raises(ChunkCorrupt):
            await lease.publish(model(), step=0)


async def test_a_version_of_which_the_relay_lost_a_blob_is_begun_once(
    both: Client, reader: Reader, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, lost = VersionLibrary.stored, list[bytes]()

    def loses_one(library: VersionLibrary, digest: bytes, size: int) -> None:
        if lost:
            stored(library, digest, size)
        lost.append(digest)

    monkeypatch.setattr(VersionLibrary, "stored", loses_one)
    async with both.claim("run") as lease:
        version = await lease.publish(model(), step=0)
    assert same(await reader.read(version.version), model())
    assert (calls.begun, calls.puts) == (1, 2)


async def test_a_version_of_more_blobs_than_one_answer_names_is_begun_once(
    both: Client, reader: Reader, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "MAX_DIGESTS", 1)
    async with both.claim("run") as lease:
        version = await lease.publish(model(), step=0)
    assert same(await reader.read(version.version), model())
    assert (calls.begun, calls.puts) == (1, 2)


async def test_a_relay_that_started_again_is_told_of_the_version_again(
    both: Client, server: Any, reader: Reader, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob, restarted = version_upload._blob, list[None]()
    loop = asyncio.get_running_loop()

    async def restart() -> None:
        await server.stop()
        await server.start()

    def restarts_once(encoding: Encoding, digest: bytes) -> bytes:
        if not restarted:
            restarted.append(None)
            asyncio.run_coroutine_threadsafe(restart(), loop).result()
        return blob(encoding, digest)

    monkeypatch.setattr(version_upload, "_blob", restarts_once)
    async with both.claim("run") as lease:
        version = await lease.publish(model(), step=0)
    assert same(await reader.read(version.version), model())
    assert calls.begun == 2
