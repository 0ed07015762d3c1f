"""Reads what a cluster needs of this machine, and what the machine has: weights, engines' settings, shared memory.

Invariant: a folder in shared memory is locked by the cluster that uses it, and one that nobody locks is removed by the
next cluster of the same user: memory that a killed cluster left does not stay taken.
"""

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.gpu_memory import host_memory
from ebbtide.local_cluster.gpu_placement import EngineNeed

T = TypeVar("T")

_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - folders below it are this user's alone, or not used
#: Until a program that loads no weights is ready: imports on busy cores.
_BOOT_S: Final = 180.0
#: Weights are read at 100 MB/s at least: a slow disk's pace, and large models compile for longer.
_BOOT_S_PER_GB: Final = 10.0
#: A trainer's bytes for each parameter: float32 weights, gradients and AdamW's two moments, and the bfloat16 bits that
#: were published last. The moments may be on the host.
_STATE_BYTES: Final = 18
_MOMENT_BYTES: Final = 8
#: Copies of the weights in shared memory: two runs, or two versions of different geometry, at once.
_MIRRORS: Final = 2
#: Beside them: changed elements, and what vLLM's processes tell each other.
_MIRROR_SPARE: Final = 1 << 30


def vllm_on_gpus() -> bool:
    """Whether the vLLM that is installed is a build for GPUs."""
    try:
        return "cpu" not in version("vllm")
    except PackageNotFoundError:
        return False


def torch_on_gpus() -> bool:
    """Whether the PyTorch that is installed is a build for CUDA. Does not import it, which would take seconds."""
    spec = find_spec("torch")
    folders = (spec.submodule_search_locations or []) if spec else []
    return any((Path(folder) / "lib" / "libtorch_cuda.so").exists() for folder in folders)


class CheckpointSize(Struct, frozen=True, kw_only=True):
    """Sizes of a checkpoint; zeros where there is none yet."""

    weights_bytes: int = 0  # as on disk
    parameters: int = 0

    @property
    def boot_s(self) -> float:
        """Seconds within which an engine that loads it is ready."""
        return _BOOT_S + _BOOT_S_PER_GB * self.weights_bytes / 1e9

    @property
    def mirror_bytes(self) -> int:
        """Room in which all workers of a host find the weights that they install."""
        return _MIRRORS * self.weights_bytes + _MIRROR_SPARE


def checkpoint_size(model: Path) -> CheckpointSize:
    """Measures the files of a Hugging Face checkpoint: bf16 unless its config says float32. An empty path: none yet."""
    if model == Path():
        return CheckpointSize()
    weights = sum(file.stat().st_size for file in model.glob("model*.safetensors"))
    return CheckpointSize(weights_bytes=weights, parameters=weights // (4 if _dtype(model) == "float32" else 2))


def _dtype(model: Path) -> str:
    try:
        config = json.loads((model / "config.json").read_text())
        return str(config.get("dtype") or config.get("torch_dtype"))
    except (OSError, ValueError, AttributeError):
        return ""


class _TrainerConfig(Struct, kw_only=True):
    """What decides on the trainer's memory, of the settings in its file."""

    offload: bool = False


class _VllmConfig(Struct, kw_only=True):
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    kv_cache_mib: int = 0
    gpu_memory_utilization: float = 0.0
    engine_args: str = ""


class _WorkerConfig(Struct, kw_only=True):
    """What places a worker, of the settings in its file."""

    engine: str = "vllm"
    vllm: _VllmConfig = msgspec.field(default_factory=_VllmConfig)


def trainer_bytes(model: Path, config: Path | None) -> int:
    """Computes what training holds on all of its GPUs between steps, activations left out, with this file of settings.

    Raises `InvalidRequest` naming the file.
    """
    found = _read(config, _TrainerConfig) if config else _TrainerConfig()
    return (_STATE_BYTES - _MOMENT_BYTES * found.offload) * checkpoint_size(model).parameters


def engine_need(name: str, model: Path, config: Path | None, *, beside: str = "") -> EngineNeed:
    """Reads what a worker with this file of settings asks of GPUs. Raises `InvalidRequest` naming the file."""
    found = _read(config, _WorkerConfig) if config else _WorkerConfig()
    own, size = found.vllm, checkpoint_size(model)
    wide = own.dtype == "float32" and _dtype(model) != "float32"
    return EngineNeed(
        name=name,
        devices=_devices(own),
        weights_bytes=size.weights_bytes * (2 if wide else 1),
        kv_cache_mib=own.kv_cache_mib,
        utilization=own.gpu_memory_utilization,
        is_vllm=found.engine == "vllm",
        beside=beside,
    )


def _read(config: Path, kind: type[T]) -> T:
    try:
        return msgspec.convert(tomllib.loads(config.read_text()), kind)
    except (OSError, ValueError) as error:  # msgspec's and tomllib's are ValueErrors
        raise InvalidRequest(str(error), field=str(config)) from None


def _devices(own: _VllmConfig) -> int:
    """The number of devices of an engine: tensor parallelism times pipeline stages, which further arguments may set."""
    sizes = {"tensor_parallel_size": own.tensor_parallel_size, "pipeline_parallel_size": 1}
    with suppress(ValueError, TypeError, AttributeError):  # the worker refuses what is no JSON object, and says why
        sizes |= {name: int(size) for name, size in json.loads(own.engine_args or "{}").items() if name in sizes}
    return max(1, math.prod(sizes.values()))


class MirrorFolder:
    """The folder of the workers' mirrors of one cluster: below its directory, or in shared memory. Made by
    `mirror_folder()`."""

    def __init__(self, directory: Path, shared_memory: Path) -> None:
        name = hashlib.blake2b(bytes(directory.resolve()), digest_size=8).hexdigest()
        self._shared_memory, self._own = shared_memory, shared_memory / f"{_prefix()}{name}"
        self._lock: int | None = None
        self.on_disk = self.path = directory / "mirrors"
        self.in_memory = self._own / "mirrors"  # the last worker removes its folder, and a lock on it would go too

    def choose(self, needed: int) -> str:
        """Takes shared memory if it has room for `needed` bytes. Returns what people are told."""
        room = _room(self._shared_memory)
        if self._lock is None and room >= needed:
            self._lock = _locked(self._own, make=True)
        if self._lock is None:
            self.path = self.on_disk
            why = f"{self._shared_memory} has room for {room / 1e9:.1f} GB of {needed / 1e9:.1f}"
            return f"Weights that workers install are on disk, in {self.path}: {why}."
        self.path = self.in_memory
        return f"Weights that workers install are in memory, in {self.path}."

    def clear(self) -> None:
        """Removes what killed workers left: as much as the weights."""
        shutil.rmtree(self.on_disk, ignore_errors=True)
        if self._lock is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


@contextmanager
def mirror_folder(directory: Path, shared_memory: Path = _SHARED_MEMORY) -> Iterator[MirrorFolder]:
    """Gives the folder of the mirrors of the cluster in `directory`, and clears it before and after.

    It is on disk until `choose` is called.
    """
    _sweep(shared_memory)
    folder = MirrorFolder(directory, shared_memory)
    folder.clear()
    try:
        yield folder
    finally:
        folder.clear()


def _prefix() -> str:
    return f"ebbtide-{os.geteuid()}-"


def _room(folder: Path) -> int:
    """Bytes that files in a folder of shared memory may take: of its limit, and of the host's memory."""
    try:
        state = os.statvfs(folder)
    except OSError:
        return 0
    return min(state.f_bavail * state.f_frsize, host_memory()[0])


def _locked(folder: Path, *, make: bool = False) -> int | None:
    """Locks a folder that is this user's alone. Returns its descriptor; None if it is another's or in use."""
    try:
        if make:
            folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    state = os.fstat(descriptor)
    if state.st_uid == os.geteuid() and not stat.S_IMODE(state.st_mode) & 0o077:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.stat().st_ino == state.st_ino:  # nobody has swept it meanwhile
                return descriptor
    os.close(descriptor)
    return None


def _sweep(shared_memory: Path) -> None:
    """Removes the folders of clusters that were killed."""
    if not shared_memory.is_dir():
        return
    for folder in shared_memory.iterdir():
        if re.fullmatch(rf"{_prefix()}[0-9a-f]{{16}}", folder.name) and (lock := _locked(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
