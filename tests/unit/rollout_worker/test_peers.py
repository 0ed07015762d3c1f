"""What a worker serves to others, to how many, and under which address."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbtide.auth.security import ClientSecurity
from ebbtide.errors import InvalidRequest, NoCapacity, VersionUnavailable
from ebbtide.rollout_worker.installs.host_mirrors import host_name
from ebbtide.rollout_worker.installs.peers import PeerBlobs, advertised, check_reachable, server_settings
from ebbtide.rollout_worker.settings import WorkerSettings, shared_folder
from ebbtide.transfer import BlobCache, Mirror
from ebbtide.types.weights import Manifest, PolicyVersion
from ebbtide.weights import Planner, Way, build_manifest, named_tensor, places, slice_tiles, tile_digest

BLOB = b"a patch of a tile"


def filled() -> tuple[Mirror, dict[bytes, bytes]]:
    """A mirror of three tiles, and what they are."""
    tensor = named_tensor("weight", np.arange(48, dtype=np.float32))
    manifest: Manifest = build_manifest("run", PolicyVersion(policy="policy", version=1), [tensor], 64)
    mirror = Mirror(manifest, None)
    tiles = {tile_digest(tile): bytes(tile) for tile in slice_tiles(tensor, 64)}
    way = Way(manifest, (), keyframe=True)
    for task in Planner(manifest, [way]).tasks(places(manifest), {}):
        mirror.apply(task, tiles)  # type: ignore[arg-type]  # there is a way for each place
    return mirror, tiles


async def read(shelf: PeerBlobs, *digests: bytes, reader: str = "r1") -> list[bytes]:
    return [data async for _, data in shelf.blobs(digests, reader)]


async def test_patches_come_from_the_cache_and_dense_tiles_from_the_mirror() -> None:
    mirror, tiles = filled()
    cache = BlobCache(1 << 20)
    cache.put(tile_digest(BLOB), BLOB)
    shelf = PeerBlobs(cache, lambda: mirror, 4)
    assert await read(shelf, tile_digest(BLOB), *tiles) == [BLOB, *tiles.values()]
    assert not shelf.streams
    mirror.close()


async def test_a_worker_without_a_mirror_yet_has_nothing() -> None:
    with pytest.raises(VersionUnavailable):
        await read(PeerBlobs(BlobCache(0), lambda: None, 4), bytes(32))


async def test_what_is_held_is_sent_before_what_is_not_is_named() -> None:
    cache = BlobCache(1 << 20)
    cache.put(tile_digest(BLOB), BLOB)
    blobs = PeerBlobs(cache, lambda: None, 4).blobs([bytes(32), tile_digest(BLOB)], "r1")
    assert await anext(blobs) == (tile_digest(BLOB), BLOB)
    with pytest.raises(VersionUnavailable, match="1 blobs"):
        await anext(blobs)


async def test_a_blob_on_its_way_is_waited_for_and_one_that_does_not_come_is_refused() -> None:
    cache = BlobCache(1 << 20)
    shelf = PeerBlobs(cache, lambda: None, 4)
    with cache.arriving([tile_digest(BLOB), bytes(32)]):
        comes = asyncio.create_task(read(shelf, tile_digest(BLOB)))
        never = asyncio.create_task(read(shelf, bytes(32), reader="r2"))
        await asyncio.sleep(0)
        cache.put(tile_digest(BLOB), BLOB)
        assert await comes == [BLOB]
        assert not never.done()
    with pytest.raises(VersionUnavailable):
        await never


async def test_readers_are_limited_and_not_their_streams() -> None:
    cache = BlobCache(1 << 20)
    shelf = PeerBlobs(cache, lambda: None, 1)
    with cache.arriving([tile_digest(BLOB)]):
        one = [asyncio.create_task(read(shelf, tile_digest(BLOB))) for _ in range(3)]
        await asyncio.sleep(0)
        assert shelf.streams == {"r1": 3}
        with pytest.raises(NoCapacity):
            await read(shelf, tile_digest(BLOB), reader="r2")
        cache.put(tile_digest(BLOB), BLOB)
        await asyncio.gather(*one)
    assert not shelf.streams
    assert await read(shelf, tile_digest(BLOB), reader="r2") == [BLOB]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"peer_listen": "0.0.0.0:0"}, "peer_advertise"),
        ({"peer_listen": "[::]:7620"}, "peer_advertise"),
        ({"peer_listen": "127.0.0.1:0", "peer_advertise": "nowhere"}, "peer_advertise"),
        ({"peer_listen": "nowhere"}, "peer_listen"),
        ({"peer_listen": "127.0.0.1:0", "peer_advertise": "a b:5"}, "peer_advertise"),
        ({"peer_listen": "127.0.0.1:0", "peer_advertise": "unix:/run/worker"}, "peer_advertise"),
        ({"peer_listen": "127.0.0.1:0", "peer_advertise": "http://worker-7:80"}, "peer_advertise"),
        ({"peer_listen": "127.0.0.1:0", "peer_advertise": "!!nonsense"}, "peer_advertise"),
        ({"peer_advertise": "worker-7:80"}, "peer_advertise"),
        ({"peer_listen": "unix:/run/worker"}, "peer_listen"),
        ({"peer_listen": "unix:/run/worker", "peer_advertise": "worker-7:80"}, "peer_listen"),
        ({"peer_listen": "10.0.0.1:7620"}, "peer_listen"),
    ],
)
def test_an_address_that_nobody_reaches_is_refused_by_name(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_reachable(WorkerSettings(**settings))
    assert refused.value.field == field
    assert str(refused.value).startswith(f"{field}: ")


def test_a_worker_may_listen_anywhere_if_it_says_where_it_is() -> None:
    trusting = ClientSecurity(allow_insecure=True)
    check_reachable(WorkerSettings(peer_listen="0.0.0.0:0", peer_advertise="worker-7:0", client=trusting))
    check_reachable(WorkerSettings(peer_listen="127.0.0.1:0"))
    check_reachable(WorkerSettings(peer_listen="[::1]:7620"))
    assert advertised("0.0.0.0:4711", "worker-7:0") == "worker-7:4711"
    assert advertised("0.0.0.0:4711", "worker-7:80") == "worker-7:80"
    assert advertised("127.0.0.1:4711", "") == "127.0.0.1:4711"


def test_a_worker_serves_with_what_it_shows_to_others_itself() -> None:
    client = ClientSecurity(token="secret", allow_insecure=True, tls=True)
    served = server_settings("10.0.0.1:7620", client)
    assert (served.listen, served.token, served.allow_insecure) == ("10.0.0.1:7620", "secret", True)


def test_who_shares_a_folder_is_of_one_host(tmp_path: Path) -> None:
    assert host_name(tmp_path / "a") == host_name(tmp_path / "a") != host_name(tmp_path / "b")
    assert (tmp_path / "a").stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match="mirror_dir"):
        host_name(tmp_path / "file" / "mirrors")


def test_each_user_has_a_folder_in_shared_memory() -> None:
    assert shared_folder() == WorkerSettings().mirror_dir != ""
