"""Keeps a trainer's whole state outside its device while another trainer computes there: weights, moments, gradients.

A state is *warm* in host memory, within a budget of bytes that all trainers of the host share, and *cold* on disk
beyond it. From a GPU a warm state goes to pinned pages. From a CPU it goes to a file in a folder in memory, and the
process's own pages are returned to the system. A file is read and checked in pieces, in several threads: warm starts
are to take seconds where a restart takes a minute (RollMux, arXiv 2512.11306, section 2).

Invariant: a storage has its bytes or none, and keeps its place in all tensors that use it, views too. It loses them
only once the whole state was written. What comes back from a file has the digest that was taken as it was written, or
`StateDamaged` is raised, and the training has to be resumed from its checkpoint. Files have no name and mode 0600, and
a reservation is locked by its process: with the process, however it ends, the kernel frees both.
"""

import ctypes
import fcntl
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import torch
from blake3 import blake3
from torch import Tensor, UntypedStorage

from ebbtide.client.publisher.tensor_snapshots import allocate
from ebbtide.errors import Unavailable
from ebbtide.gpu_memory import host_memory
from ebbtide.run_client import RunFailed
from ebbtide.trainer.settings import TrainerSettings
from ebbtide.types.ids import new_fence

#: Bytes of a file that are copied and checked at once.
_PIECE: Final = 16 << 20
#: Bytes of one call of the kernel: what was copied is still in the processor's cache when it is checked.
_BLOCK: Final = 1 << 20
_THREADS: Final = 4

#: Another trainer has the budget's lock for less than that, unless it is frozen; and how often it is tried.
_LOCKED_S: Final = 2.0
_LOOK_S: Final = 0.005

_libc = ctypes.CDLL(None, use_errno=True)


class StateDamaged(Unavailable):
    """What comes back is not what was written: the run resumes from its checkpoint."""


def storages_of(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Returns each storage of the tensors once. Tensors whose storage cannot be emptied, such as those that were
    mapped from a file, get another one with the same bytes first: all that share one must be given."""
    users: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        users.setdefault(_address(tensor), []).append(tensor)
    return [_emptiable(sharing) for sharing in users.values()]


def _address(tensor: Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - what tells storages apart
    return found


def _emptiable(sharing: Sequence[Tensor]) -> UntypedStorage:
    old = sharing[0].untyped_storage()
    if old.resizable():
        return old
    new = torch.empty(old.nbytes(), dtype=torch.uint8, device=old.device)
    new.copy_(_bytes_of(old))
    for tensor in sharing:
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        home: Any = torch.empty(0, dtype=tensor.dtype, device=old.device)
        tensor.data = home.set_(new.untyped_storage(), *place)
    return new.untyped_storage()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """The storage as a tensor of bytes."""
    empty: Any = torch.empty(0, dtype=torch.uint8, device=storage.device)
    found: Tensor = empty.set_(storage, 0, (storage.nbytes(),), (1,))
    return found


class StateCopy(Protocol):
    """A copy of storages."""

    def write(self, storages: Sequence[UntypedStorage]) -> None:
        """Copy the storages. Raises `OSError` if there is no room."""
        ...

    def read_into(self, storages: Sequence[UntypedStorage]) -> None:
        """Fill the same storages, which have their sizes again. Raises `StateDamaged`."""
        ...

    def close(self) -> None:
        """Free it."""
        ...


class PinnedCopy:
    """A copy of a GPU's storages in host memory, in locked pages. It is used again for states of the same sizes."""

    def __init__(self) -> None:
        self._places: list[Tensor] = []

    def write(self, storages: Sequence[UntypedStorage]) -> None:
        sizes = [storage.nbytes() for storage in storages]
        if [place.nbytes for place in self._places] != sizes:
            self._places = []
            self._places = [
                torch.from_numpy(allocate(size, str(storage.device)))
                for size, storage in zip(sizes, storages, strict=True)
            ]
        for place, storage in zip(self._places, storages, strict=True):
            place.copy_(_bytes_of(storage), non_blocking=True)
        _settle(storages)

    def read_into(self, storages: Sequence[UntypedStorage]) -> None:
        for place, storage in zip(self._places, storages, strict=True):
            _bytes_of(storage).copy_(place, non_blocking=True)
        _settle(storages)

    def close(self) -> None:
        self._places = []


def _settle(storages: Sequence[UntypedStorage]) -> None:
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)


class _Piece(NamedTuple):
    storage: int
    start: int  # in the storage
    size: int
    at: int  # in the file


def _pieces(sizes: Iterable[int]) -> Iterator[_Piece]:
    at = 0
    for number, size in enumerate(sizes):
        for start in range(0, size, _PIECE):
            length = min(_PIECE, size - start)
            yield _Piece(number, start, length, at)
            at += length


class FileCopy:
    """A copy of storages in a file without a name."""

    def __init__(self, folder: Path) -> None:
        """Raises `OSError` if the folder cannot be written to."""
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            self._file = os.dup(file.fileno())
        self._closed = weakref.finalize(self, os.close, self._file)
        self._digests: list[bytes] = []

    def write(self, storages: Sequence[UntypedStorage]) -> None:
        sizes = [storage.nbytes() for storage in storages]
        if any(sizes):
            os.posix_fallocate(self._file, 0, sum(sizes))  # a full disk is known before anything is written
        self._digests = _in_threads(lambda piece: self._write(piece, storages[piece.storage]), list(_pieces(sizes)))

    def read_into(self, storages: Sequence[UntypedStorage]) -> None:
        pieces = list(_pieces(storage.nbytes() for storage in storages))
        try:
            digests = _in_threads(lambda piece: self._read(piece, storages[piece.storage]), pieces)
        except OSError as error:
            raise StateDamaged(f"the trainer's state cannot be read back ({error.strerror})") from None
        if digests != self._digests:
            raise StateDamaged("the trainer's state came back with other bytes than it had; check memory and disk")

    def close(self) -> None:
        self._closed()

    def _write(self, piece: _Piece, storage: UntypedStorage) -> bytes:
        digest = blake3()
        with _host_view(piece, storage) as view:
            for start in range(0, piece.size, _BLOCK):
                block = view[start : start + _BLOCK]
                digest.update(block)
                done = 0
                while done < len(block):
                    done += os.pwrite(self._file, block[done:], piece.at + start + done)
        return digest.digest()

    def _read(self, piece: _Piece, storage: UntypedStorage) -> bytes:
        digest = blake3()
        with _host_view(piece, storage, back=True) as view:
            for start in range(0, piece.size, _BLOCK):
                block = view[start : start + _BLOCK]
                done = 0
                while done < len(block):
                    count = os.preadv(self._file, [block[done:]], piece.at + start + done)
                    if not count:
                        raise StateDamaged("the file of the trainer's state is shorter than it was")
                    done += count
                digest.update(block)
        return digest.digest()


@contextmanager
def _host_view(piece: _Piece, storage: UntypedStorage, *, back: bool = False) -> Iterator[memoryview]:
    """The bytes of a piece: those of the storage on a CPU, and a copy from elsewhere. `back`: what is written into the
    view gets into the storage at the end."""
    if storage.device.type == "cpu":
        yield _view(storage.data_ptr() + piece.start, piece.size)
        return
    there = _bytes_of(storage)[piece.start : piece.start + piece.size]
    here = torch.empty(piece.size, dtype=torch.uint8) if back else there.cpu()
    yield _view(here.data_ptr(), piece.size)
    if back:
        there.copy_(here)


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _in_threads(work: Callable[[_Piece], bytes], pieces: Sequence[_Piece]) -> list[bytes]:
    """What `work` returns of each piece, in their order."""
    threads = min(_THREADS, os.cpu_count() or 1, len(pieces))
    if threads <= 1:
        return [work(piece) for piece in pieces]
    with ThreadPoolExecutor(threads, "state") as pool:
        return list(pool.map(work, pieces))


class HostBudget:
    """Bytes of host memory that the warm states of all trainers of a host take together. All are given one folder and
    one limit."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._path = folder / f"{new_fence()}.warm"
        self._lock: int | None = None
        self._freed: Callable[[], object] = _nothing

    def reserve(self, size: int) -> bool:
        """Reserve `size` bytes in place of those before. Returns whether the budget has them. Raises `OSError`."""
        with _locked(self._folder / "warm.lock"):
            others = sum(_reserved(path) for path in self._folder.glob("*.warm") if path != self._path)
            if others + size > self._limit:
                self.release()
                return False
            if self._lock is None:
                self._lock = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                self._freed = weakref.finalize(self, _free, self._path, self._lock)
            os.pwrite(self._lock, b"%20d" % size, 0)
            return True

    def release(self) -> None:
        self._freed()
        self._lock, self._freed = None, _nothing


def _nothing() -> None:
    """Nothing is reserved."""


def _free(path: Path, lock: int) -> None:
    with suppress(OSError):
        path.unlink()
    os.close(lock)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        end = time.monotonic() + _LOCKED_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError(f"{path} stays locked by another trainer") from None
                time.sleep(_LOOK_S)
        yield
    finally:
        os.close(descriptor)


def _reserved(path: Path) -> int:
    """Bytes of another process's reservation. One whose process is gone is removed."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return 0
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return int(os.pread(descriptor, 20, 0) or 0)
    finally:
        os.close(descriptor)
    return 0


class Parked(NamedTuple):
    """What was parked."""

    size: int  # bytes
    warm: bool


class StatePark:
    """Where one process parks its state. `warm`: a folder in memory, for files and reservations; `cold`: one on disk.
    Both are made if they do not exist. `warm_bytes`: the budget of the host."""

    def __init__(self, warm: Path, cold: Path, *, warm_bytes: int) -> None:
        self._warm, self._cold = warm, cold
        self._budget = HostBudget(warm, warm_bytes)
        self._pinned = PinnedCopy()
        self._copy: StateCopy | None = None
        self._sizes: list[int] = []
        self._storages: list[UntypedStorage] = []

    @property
    def taken(self) -> bool:
        """Whether a state is parked."""
        return self._copy is not None

    def park(self, storages: Sequence[UntypedStorage]) -> Parked:
        """Copy the storages and empty them, until `bring_back`. Raises `RunFailed` if there is no room for them."""
        sizes = [storage.nbytes() for storage in storages]
        copy, warm = self._copied(storages, sum(sizes))
        self._copy, self._sizes, self._storages = copy, sizes, list(storages)
        for storage in storages:
            storage.resize_(0)
        return Parked(sum(sizes), warm)

    def bring_back(self) -> int:
        """Fill the storages again. Returns the bytes. Raises `StateDamaged`, after which nothing is parked, and what
        an allocation raises, after which the state is still parked."""
        if self._copy is None:
            return 0
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
        try:
            self._copy.read_into(self._storages)
        except StateDamaged:
            self.close()
            raise
        if self._copy is not self._pinned:  # pinned pages stay, as locking them takes long
            self._copy.close()
            self._budget.release()
        self._copy, self._storages = None, []
        return sum(self._sizes)

    def close(self) -> None:
        """Free what is parked."""
        if self._copy is not None:
            self._copy.close()
        self._pinned.close()
        self._budget.release()
        self._copy, self._storages = None, []

    def _copied(self, storages: Sequence[UntypedStorage], size: int) -> tuple[StateCopy, bool]:
        on_gpu = any(storage.device.type == "cuda" for storage in storages)
        problems: list[str] = []
        try:
            self._warm.mkdir(0o700, parents=True, exist_ok=True)
            if self._budget.reserve(size):
                return self._written(self._pinned if on_gpu else FileCopy(self._warm), storages), True
            problems.append("the host's budget is taken")
        except (OSError, MemoryError) as error:
            problems.append(f"{self._warm}: {error}")
        self._budget.release()
        self._pinned.close()
        try:
            self._cold.mkdir(0o700, parents=True, exist_ok=True)
            return self._written(FileCopy(self._cold), storages), False
        except OSError as error:
            problems.append(f"{self._cold}: {error}")
        raise RunFailed(
            f"the trainer's state of {size} bytes has no room beside its device ({'; '.join(problems)}); raise the "
            "trainer's warm_mib, or name a cold_dir with more room"
        )

    def _written(self, copy: StateCopy, storages: Sequence[UntypedStorage]) -> StateCopy:
        try:
            copy.write(storages)
        except BaseException:
            copy.close()
            raise
        return copy


def park_of(settings: TrainerSettings) -> StatePark:
    """The place for a state that a trainer's settings name."""
    limit = settings.warm_mib << 20 or host_memory()[1] // 2
    return StatePark(settings.warm_folder(), settings.cold_folder(), warm_bytes=limit)


def return_free_memory() -> None:
    """Give memory that the C library keeps for later back to the system, where it can."""
    with suppress(AttributeError):
        _libc.malloc_trim(0)
