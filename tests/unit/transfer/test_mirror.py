"""A mirror holds what it says, bit for bit, whatever it was before and whatever comes."""

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from ebbtide.errors import ChunkCorrupt, InvalidRequest
from ebbtide.transfer import ElementChanges, Mirror
from ebbtide.types.weights import PolicyVersion
from ebbtide.weights import NamedTensor, TileTask, build_manifest, places, tile_digest, tile_sizes
from tests.unit.transfer.filling import assert_right, blobs_of, bring, content, tasks_to
from tests.unit.weights.chain import Link, chain, whole


@pytest.fixture(scope="module")
def links() -> list[Link]:
    return chain(5, seed=11)


@pytest.fixture
def mirror(links: list[Link]) -> Mirror:
    return Mirror(links[0].manifest, None)


def test_every_dtype_shape_and_piece_comes_back_bit_for_bit(links: list[Link], mirror: Mirror) -> None:
    for number in (1, 2, 5, 3, 4):
        bring(mirror, links, number)
        assert_right(mirror, links[number - 1])


def test_the_file_is_safetensors_of_whole_tensors(links: list[Link], mirror: Mirror) -> None:
    bring(mirror, links, 2)
    with safe_open(str(mirror.path), "np") as file:
        assert set(file.keys()) == {entry.name for entry in links[0].manifest.tensors}
        assert file.get_slice("rows").get_shape() == [10, 16]
        assert file.get_tensor("full").tobytes() == whole(links[1])["full"]


@pytest.mark.parametrize("seed", range(10))
def test_any_mixture_of_versions_becomes_the_wanted_one(links: list[Link], mirror: Mirror, seed: int) -> None:
    rng = np.random.default_rng(seed)
    blobs = blobs_of(links)
    for number in rng.integers(1, 6, size=4).tolist():
        some = [place for place in places(links[0].manifest) if rng.random() < 0.5]
        for task in tasks_to(mirror, links, number, some):
            mirror.apply(task, blobs)
    wanted = int(rng.integers(1, 6))
    for task in rng.permutation(
        np.array([*tasks_to(mirror, links, wanted, start=int(rng.integers(1, wanted + 1))), None])
    ):
        if task is not None:
            mirror.apply(task, blobs)
    assert_right(mirror, links[wanted - 1])


def test_threads_may_write_neighbouring_tiles_of_pieces_whose_rows_lie_apart(links: list[Link]) -> None:
    blobs = blobs_of(links)
    with ThreadPoolExecutor(8) as threads:
        for _ in range(20):
            mirror = Mirror(links[0].manifest, None)
            for number in (1, 3, 5):
                tasks = tasks_to(mirror, links, number)
                list(threads.map(mirror.apply, tasks, [blobs] * len(tasks)))
                assert_right(mirror, links[number - 1])


def test_what_does_not_come_out_right_is_not_written(links: list[Link], mirror: Mirror) -> None:
    bring(mirror, links, 1)
    before, held = content(mirror), mirror.held()
    for task in tasks_to(mirror, links, 3):
        for digest in task.blobs:
            blobs = blobs_of(links)
            for at in range(0, len(blobs[digest]), 7):
                broken = bytearray(blobs[digest])
                broken[at] ^= 0x10
                with pytest.raises(ChunkCorrupt):
                    mirror.apply(task, {**blobs, digest: bytes(broken)})
            for cut in (blobs[digest][:-1], blobs[digest] + b"\0", b""):
                with pytest.raises(ChunkCorrupt):
                    mirror.apply(task, {**blobs, digest: cut})
    assert (content(mirror), mirror.held()) == (before, held)


def test_a_patch_on_another_base_is_refused(links: list[Link], mirror: Mirror) -> None:
    bring(mirror, links, 1)
    to_third = [task for task in tasks_to(mirror, links, 3) if task.patches and not task.dense]
    bring(mirror, links, 4)
    refused = 0
    for task in to_third:
        if mirror.held()[task.place] != links[0].manifest.tensors[task.place[0]].digests[task.place[1]]:
            refused += 1
            with pytest.raises(ChunkCorrupt):
                mirror.apply(task, blobs_of(links))
    assert refused
    assert_right(mirror, links[3])


def test_a_task_of_another_geometry_is_refused(links: list[Link], mirror: Mirror) -> None:
    task = tasks_to(mirror, links, 1)[0]
    with pytest.raises(InvalidRequest, match="geometry"):
        mirror.apply(TileTask(task.place, task.digest, task.length - 1, task.dense, (), 1), blobs_of(links))


def test_damage_is_seen_when_it_is_looked_for(links: list[Link], mirror: Mirror) -> None:
    bring(mirror, links, 2)
    with mirror.path.open("r+b") as file:
        file.seek(-1, 2)
        byte = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([byte[0] ^ 1]))
    mirror.mend(list(places(links[0].manifest)))
    assert not mirror.holds(links[1].manifest)
    assert len(tasks_to(mirror, links, 2)) == 1
    bring(mirror, links, 2)
    assert_right(mirror, links[1])


def test_some_places_of_a_version_may_be_all_that_is_wanted(links: list[Link], mirror: Mirror) -> None:
    bring(mirror, links, 1)
    changed = {task.place for task in tasks_to(mirror, links, 3)}
    same = [place for place in places(links[0].manifest) if place not in changed]
    assert mirror.holds(links[0].manifest)
    assert not mirror.holds(links[2].manifest)
    assert mirror.holds(links[2].manifest, same)
    assert mirror.holds(links[2].manifest, [])
    assert not mirror.holds(links[2].manifest, [*same, min(changed)])


def test_peers_read_the_tiles_that_are_there_and_no_others(links: list[Link], mirror: Mirror) -> None:
    bring(mirror, links, 2)
    for entry in links[1].manifest.tensors:
        for digest in entry.digests:
            assert mirror.read(digest) == links[1].blobs[digest]
    there = {digest for entry in links[1].manifest.tensors for digest in entry.digests}
    for digest in blobs_of(links).keys() - there:
        assert mirror.read(digest) is None
    assert mirror.read(b"short") is None


def test_views_of_tensors_outlive_the_mirror(links: list[Link], mirror: Mirror) -> None:
    bring(mirror, links, 1)
    views = {tensor.name: tensor.data for tensor in mirror.tensors()}
    mirror.close()
    mirror.close()
    assert {name: bytes(view) for name, view in views.items()} == whole(links[0])


def test_it_remembers_whose_versions_its_tiles_are(links: list[Link], mirror: Mirror) -> None:
    assert mirror.versions("run", "policy") == []
    mirror.remember("run", "policy", [7, 3, 7])
    assert mirror.versions("run", "policy") == [7, 3]
    assert mirror.versions("run", "other") == []
    mirror.remember("run", "policy", range(100))
    assert mirror.versions("run", "policy") == list(range(92, 100))


# -- changes -----------------------------------------------------------------------------------------------------


def changed(base: dict[str, bytes], path: Path) -> dict[str, bytes]:
    """The tensors of `base` with the changes in a file."""
    arrays = {name: bytearray(data) for name, data in base.items()}
    with safe_open(str(path), "np") as file:
        for name in {key.rpartition(".")[0] for key in file.keys()}:  # noqa: SIM118 - no mapping
            indices, slices = file.get_tensor(f"{name}.indices"), file.get_slice(f"{name}.values")
            assert np.all(np.diff(indices) > 0)
            width = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1}[slices.get_dtype()]
            values = raw(path, f"{name}.values").reshape(-1, width)
            np.frombuffer(arrays[name], np.uint8).reshape(-1, width)[indices] = values
    return {name: bytes(data) for name, data in arrays.items()}


def raw(path: Path, name: str) -> np.ndarray:
    import json

    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    start, end = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    return np.frombuffer(data[8 + length + start : 8 + length + end], np.uint8)


def test_changes_turn_the_version_before_into_the_new_one(links: list[Link], mirror: Mirror, tmp_path: Path) -> None:
    bring(mirror, links, 1)
    changes = ElementChanges(links[0].manifest, share=1.0)
    bring(mirror, links, 3, changes)
    bring(mirror, links, 4, changes)  # several pulls add up
    changes.write(tmp_path / "changes")
    assert not changes.given_up
    assert changed(whole(links[0]), tmp_path / "changes") == whole(links[3])


def test_changes_give_up_when_there_are_too_many(links: list[Link], mirror: Mirror) -> None:
    bring(mirror, links, 1)
    changes = ElementChanges(links[0].manifest, share=0.01)
    bring(mirror, links, 2, changes)
    assert changes.given_up
    assert not mirror.keep_changes(b"1", b"2", changes)


@pytest.mark.parametrize("shared", [False, True])
def test_changes_are_kept_for_the_hosts_other_engines(links: list[Link], tmp_path: Path, shared: bool) -> None:
    mirrors = [Mirror(links[0].manifest, tmp_path / "m" if shared else None)]
    mirrors.append(Mirror(links[0].manifest, tmp_path / "m") if shared else mirrors[0])
    bring(mirrors[0], links, 1)
    changes = ElementChanges(links[0].manifest, share=1.0)
    bring(mirrors[0], links, 2, changes)
    assert mirrors[1].changes(b"1", b"2") is None
    assert mirrors[0].keep_changes(b"1", b"2", changes)
    assert mirrors[1].changes(b"1", b"3") is None
    path = mirrors[1].changes(b"1", b"2")
    assert path is not None
    assert changed(whole(links[0]), path) == whole(links[1])
    for mirror in mirrors:
        mirror.close()


def test_the_digest_that_is_recorded_is_the_tiles_own(links: list[Link], mirror: Mirror) -> None:
    bring(mirror, links, 3)
    for place, digest in mirror.held().items():
        data = mirror.read(digest)
        assert data is not None
        assert tile_digest(data) == digest == links[2].manifest.tensors[place[0]].digests[place[1]]


async def test_one_holds_a_mirror_at_a_time_in_one_process_too(mirror: Mirror) -> None:
    order: list[str] = []

    async def user(name: str) -> None:
        async with mirror.hold():
            order.append(name)
            await asyncio.sleep(0)
            order.append(name)

    await asyncio.gather(*(user(name) for name in "abcd"))
    assert order[::2] == order[1::2]


def test_a_tile_that_several_places_share_is_put_in_all_of_them() -> None:
    zeros = [NamedTensor(name=name, dtype="U8", shape=(32,), data=memoryview(bytes(32))) for name in "ab"]
    manifest = build_manifest("run", PolicyVersion(policy="p", version=1), zeros, tile_bytes=16)
    mirror = Mirror(manifest, None)
    (digest,) = tile_sizes(manifest)
    with mirror.path.open("r+b") as file:
        file.seek(-64, 2)
        file.write(b"x" * 64)
    for place in places(manifest):
        assert not mirror.holds(manifest)
        mirror.apply(TileTask(place, digest, 16, digest, (), 16), {digest: bytes(16)})
    assert mirror.holds(manifest)
    assert content(mirror) == {"a": bytes(32), "b": bytes(32)}


def test_a_puller_warms_up_beside_its_work() -> None:
    code = """
import sys
from ebbtide.transfer import Puller
from ebbtide.types.weights import Holder
puller = Puller(None, "", holder=lambda: Holder(name="x"), patience_s=0.0, open_source=None)
assert "numba" not in sys.modules
puller.warm_up()
puller._threads._pool.shutdown()
assert "ebbtide.weights.compiled_kernels" in sys.modules or "ebbtide.weights.numpy_kernels" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
