"""The way of a version from a trainer's device to an engine's, each stage alone: what the trainer waits for, what the
hosts compute, what an engine stands still for.
"""

import mmap
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_parts.harness import PartRun
from benchmarks.gpu_parts.shapes import QWEN3_8B, QWEN3_1700M, SMALL, Shape, change, release, settle, tensors
from ebbtide.client.publisher.tensor_snapshots import TensorSnapshot
from ebbtide.gpu_memory import host_memory
from ebbtide.rollout_worker.engine.vllm.version_updates import ChangeEntry, why_not
from ebbtide.trainer.learning.gpu_changes import KeptTensors
from ebbtide.transfer import ElementChanges, Mirror
from ebbtide.types.weights import Manifest, PolicyVersion
from ebbtide.weights import TileTask, patched_tiles, seal_manifest, slice_tiles
from ebbtide.weights.version_encoding import Described, Encoded, Encoding

#: Threads of a publisher and of a worker, as on hosts with many cores.
ENCODERS: Final = 8
APPLIERS: Final = 4
#: Share of the elements that differs between two versions, unless a part says otherwise.
DENSITY: Final = 0.03
#: Copies of the weights that the parts here have in the host's memory at once: two snapshots, a mirror, changes.
_COPIES: Final = 4
#: Shares that an update in place is measured at.
_SHARES: Final = (0.01, 0.03, 0.1)


class PublishedVersion(NamedTuple):
    """What a publisher knows of a version, beside its snapshot."""

    manifest: Manifest
    encoding: Encoding
    encoded: Encoded
    tiles: list[list[int]]  # bytes of each tile of each tensor


class WeightPath:
    """A publisher's two snapshots and a worker's mirror of the same tensors."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._snapshots = [TensorSnapshot(), TensorSnapshot()]
        self._known: Described | None = None
        self._count = 0
        self._mirror: Mirror | None = None

    def publish(self, weights: Iterable[tuple[str, Tensor]]) -> tuple[PublishedVersion, dict[str, Any]]:
        """Publishes them as a trainer does that keeps the last version on its device. Returns seconds and bytes, too.
        The version is good until the next but one."""
        snapshot, before = self._snapshots[self._count % 2], self._snapshots[1 - self._count % 2]
        snapshot.follow(before.give_up())
        kept = KeptTensors(lambda: weights, self._device)
        pause_s = _timed(lambda: snapshot.take(kept), self._device)
        began = time.perf_counter()
        found = snapshot.fetch()
        fetch_s = time.perf_counter() - began
        size = sum(tensor.data.nbytes for tensor in snapshot.tensors)
        encoding = Encoding(snapshot.tensors, self._known, keep_bytes=size, found=found)
        began = time.perf_counter()
        with ThreadPoolExecutor(ENCODERS) as threads:
            for done in [threads.submit(encoding.work) for _ in range(ENCODERS)]:
                done.result()
        encoded = encoding.result()
        encode_s = time.perf_counter() - began
        self._count += 1
        self._known = Described(snapshot.tensors, encoded.entries)
        version = PolicyVersion(policy="policy", version=self._count, parent=self._count - 1, step=0)
        tiles = [list(map(len, slice_tiles(tensor))) for tensor in snapshot.tensors]
        published = PublishedVersion(seal_manifest("gpu", version, encoded.entries), encoding, encoded, tiles)
        stages = {"pause_s": pause_s, "fetch_s": fetch_s, "encode_s": encode_s}
        patch = sum(sum(part.sizes) for part in encoded.patches)
        return published, {**stages, "bytes": size, "patch_bytes": patch, "changed": encoded.changed / encoded.elements}

    def pull(self, version: PublishedVersion, changes: ElementChanges | None = None) -> float:
        """Brings the mirror to a version, the next after the one that it has, and notes its `changes`. Returns the
        seconds. Raises `ValueError` if it has another one then."""
        mirror = self._mirror = self._mirror or Mirror(version.manifest, None)
        entries, parts = version.encoded.entries, version.encoded.patches

        def apply(place: tuple[int, int, bytes]) -> None:
            tensor, tile, blob = place
            digest = entries[tensor].digests[tile]
            dense = digest == blob
            task = TileTask(
                place=(tensor, tile),
                digest=digest,
                length=version.tiles[tensor][tile],
                dense=blob if dense else b"",
                patches=() if dense else (blob,),
                cost=0,
            )
            mirror.apply(task, {blob: bytes(version.encoding.blob(blob))}, changes)

        work = [(tensor, tile, blob) for tensor, part in enumerate(parts) for tile, _, blob in patched_tiles(part)]
        began = time.perf_counter()
        with ThreadPoolExecutor(APPLIERS) as threads:
            for _ in threads.map(apply, work):
                pass
        took = time.perf_counter() - began
        if not mirror.holds(version.manifest):
            raise ValueError("the mirror has not become the version that was published")
        return took

    def close(self) -> None:
        if self._mirror is not None:
            self._mirror.close()


def publishing(run: PartRun) -> None:
    """A version from the trainer's device to a worker's mirror and its file of changes, stage by stage."""
    for shape in (SMALL,) if run.small else (QWEN3_1700M, QWEN3_8B):
        free, _ = host_memory()
        if free < _COPIES * 2 * shape.parameters:
            run.tell(**{shape.name: {"skipped": f"the host has {free >> 30} GiB free"}})
            continue
        run.tell(**{shape.name: published(run, shape)})
        release(run.device)


def published(run: PartRun, shape: Shape) -> dict[str, Any]:
    """Stages of a first version, of one with `DENSITY` of it changed, and of one more whose changes are kept."""
    weights, path = tensors(shape, run.device), WeightPath(run.device)
    found = dict[str, Any]()
    try:
        for number, name in enumerate(("first", "second", "third")):
            if number:
                change(weights, DENSITY, number)
            version, stages = path.publish(weights.items())
            noted = ElementChanges(version.manifest) if name == "third" else None
            stages["apply_s" if noted is None else "apply_and_note_s"] = path.pull(version, noted)
            found[name] = stages | (
                {} if noted is None else changes_file(noted, version.manifest, run.folder / "changes")
            )
            run.tell(**{shape.name: found})
    finally:
        path.close()
    return found


def changes_file(noted: ElementChanges, manifest: Manifest, path: Path) -> dict[str, Any]:
    """Seconds to write the file of changes and to check it before an engine stands still, and its bytes."""
    if noted.given_up:
        return {"changes": "given up: too many"}
    began = time.perf_counter()
    noted.write(path)
    write_s = time.perf_counter() - began
    entries = {entry.name: ChangeEntry(entry.dtype, tuple(entry.shape)) for entry in manifest.tensors}
    began = time.perf_counter()
    if refused := why_not(path, entries):
        raise ValueError(refused)
    check_s = time.perf_counter() - began
    found = {"changes_write_s": write_s, "changes_check_s": check_s, "changes_bytes": path.stat().st_size}
    path.unlink()
    return found


def in_place(run: PartRun) -> None:
    """The pause of an update without vLLM: what its loader does with changes, as arithmetic alone, and copies of whole
    weights from the mirror's memory.

    The loader fills a tensor with NaN, puts the changed values into it, and keeps the old where it is NaN.
    """
    shape = SMALL if run.small else QWEN3_8B
    weights = tensors(shape, run.device)
    size = sum(tensor.nbytes for tensor in weights.values())
    found = dict[str, Any]()
    for share in _SHARES:
        changes = {name: picked(tensor, share) for name, tensor in weights.items()}
        nbytes = sum(places.nbytes + values.nbytes for places, values in changes.values())
        seconds = _timed(lambda: write_changes(weights, changes), run.device)  # noqa: B023
        found[f"{share:.0%}"] = {"seconds": seconds, "changes_bytes": nbytes}
        run.tell(bytes=size, changed=found)
    weights = {}
    release(run.device)
    run.tell(copies_gb_per_s=host_copies(run))


def picked(tensor: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Positions (int32) and values, in the host's ordinary memory, of about this share of a tensor."""
    step = max(1, round(1 / share))
    places = torch.arange(0, tensor.numel(), step, dtype=torch.int32)
    return places, tensor.flatten()[::step].cpu()


def write_changes(weights: dict[str, Tensor], changes: dict[str, tuple[Tensor, Tensor]]) -> None:
    for name, tensor in weights.items():
        places, values = (part.to(tensor.device) for part in changes[name])
        marked = torch.full((tensor.numel(),), float("nan"), dtype=tensor.dtype, device=tensor.device)
        marked[places] = values
        marked = marked.view(tensor.shape)
        torch.where(torch.isnan(marked), tensor, marked, out=tensor)


def host_copies(run: PartRun) -> dict[str, float | None]:
    """GB/s from a file in shared memory to the device: by ordinary pages, and by pages that CUDA has registered."""
    size = 1 << 24 if run.small else 1 << 31
    with (run.folder / "pages").open("w+b") as file:
        file.truncate(size)
        pages = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
    pages[:] = 1
    source, there = torch.from_numpy(pages), torch.empty(size, dtype=torch.uint8, device=run.device)

    def rate() -> float:
        return size / min(_timed(lambda: there.copy_(source, non_blocking=True), run.device) for _ in range(3)) / 1e9

    found: dict[str, float | None] = {"pageable": rate(), "registered": None, "register": None}
    if run.on_gpu:
        began = time.perf_counter()
        with registered(pages):
            found |= {"register": size / (time.perf_counter() - began) / 1e9, "registered": rate()}
    return found


@contextmanager
def registered(pages: np.ndarray[Any, np.dtype[np.uint8]]) -> Iterator[None]:
    """Locks the pages for the device. Raises `ValueError` if CUDA refuses."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = pages.ctypes.data
    if (status := int(runtime.cudaHostRegister(address, pages.nbytes, 0))) != 0:
        raise ValueError(f"cudaHostRegister gave {status}")
    try:
        yield
    finally:
        runtime.cudaHostUnregister(address)


def _timed(work: Callable[[], object], device: str) -> float:
    settle(device)
    began = time.perf_counter()
    work()
    settle(device)
    return time.perf_counter() - began
