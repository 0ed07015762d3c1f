"""Shares memory between a serving-guard and the engines that borrow from it: a page for each, in a private folder.

The page says what an engine may do in its next step, and what it has done.

Invariant: the page has three parts with one writer each. The guard writes the *budget*, under a sequence number that is
odd during the write, so that no reader takes half of one. The worker writes the *lease*, which it renews with each
grant. The engine writes the *steps*. All times are nanoseconds of CLOCK_MONOTONIC, which all processes of a host share.
A step may begin only while the budget has tokens, and neither budget nor lease has run out. So if any of the three dies
or freezes, the engine stands still when the lease or the budget runs out. The page outlives all of them. A new engine
resets its part, and so does a worker that announces one before it boots. A writer that died during a write leaves a
budget that cannot be read, which counts as none.

The engine writes that it steps before it reads the budget. The guard takes the budget away before it reads whether the
engine steps. There is a fence between the two on each side, so at least one sees the other. No reader waits for a
writer.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.types.grants import Budget

_SIZE: Final = 4096
_MAGIC: Final = 0x0001_4544_4954_4242  # "BBTIDE", then the layout's number
# Indexes of 64-bit words. Each part has its own cache lines.
_LAYOUT = 0
_BELL, _VERSION, _TOKENS, _SEQUENCES, _UNTIL, _IDLE = 8, 9, 10, 11, 12, 13
_LEASE, _KV_BLOCKS = 16, 17
_STEPPING, _BEGAN, _ENDED, _STEPS, _SCHEDULED, _BUSY, _RUNNING, _WAITING, _KV_USED, _KV_TOTAL, _RECOMPUTED = range(
    24, 35
)
_PID, _BLOCK_BYTES = 35, 36
#: Attempts to read a budget that is being written; then its writer has died, and there is no budget.
_LOOKS: Final = 50
_NEVER: Final = 2**63 - 1
#: Greater times and numbers are cut to this, which fits into a word.
_MOST: Final = 1 << 62


class Stepping(Struct, frozen=True, kw_only=True):
    """The engine's part. Times are seconds of the monotonic clock; sums are since the engine's start."""

    stepping: bool  # a step is under way
    began: float  # when the last step began
    ended: float  # when the last finished step ended
    steps: int  # sum of finished steps
    scheduled: int  # sum of their tokens
    busy_s: float  # sum of their durations
    running: int
    waiting: int
    kv_used: int  # blocks
    kv_total: int  # blocks
    recomputed: int  # sum of tokens computed again after their memory was taken
    pid: int  # 0: no engine has begun yet
    block_bytes: int = 0


class Page:
    """The mapped page. Comments below say whether guard, worker or engine may call a method."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Map the page at `path`; with `create`, make it if it does not exist.

        Raises `InvalidRequest` if the file is not a page, or belongs to another user.
        """
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise InvalidRequest(f"cannot be opened: {error.strerror}", field=str(path)) from None
        try:
            self._file = _identity(os.fstat(descriptor))
            self._memory = _mapped(descriptor, path, create=create)
        finally:
            os.close(descriptor)
        self._lock = threading.Lock()
        self._words = memoryview(self._memory).cast("q")
        self._halves = memoryview(self._memory).cast("I")
        self._bell = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + 8 * _BELL
        if create and self._words[_LAYOUT] == 0:
            self._words[_LAYOUT] = _MAGIC
        if self._words[_LAYOUT] != _MAGIC:
            raise InvalidRequest("is not a page of grants, or of another version", field=str(path))

    # For the guard.

    def write_budget(self, budget: Budget, *, idle: bool = False) -> None:
        """Set the budget of the next step, and wake the engine if it waits. `idle`: nothing is inside the serving
        engine."""
        words = self._words
        version = words[_VERSION] | 1
        words[_VERSION] = version
        words[_TOKENS], words[_SEQUENCES] = _word(budget.tokens), _word(budget.sequences)
        words[_UNTIL], words[_IDLE] = _word(budget.until * 1e9), int(idle)
        words[_VERSION] = version + 1
        self._fence()
        if budget.tokens:
            self.ring()

    def steps(self) -> Stepping:
        """The engine's part of the page."""
        words = self._words
        return Stepping(
            stepping=bool(words[_STEPPING]),
            began=words[_BEGAN] / 1e9,
            ended=words[_ENDED] / 1e9,
            steps=words[_STEPS],
            scheduled=words[_SCHEDULED],
            busy_s=words[_BUSY] / 1e9,
            running=words[_RUNNING],
            waiting=words[_WAITING],
            kv_used=words[_KV_USED],
            kv_total=words[_KV_TOTAL],
            recomputed=words[_RECOMPUTED],
            pid=words[_PID],
            block_bytes=words[_BLOCK_BYTES],
        )

    # For the worker.

    def renew(self, until: float) -> None:
        """Hold a grant until `until` (seconds, monotonic); 0 gives it back."""
        held = self._words[_LEASE] > time.monotonic_ns()
        self._words[_LEASE] = _word(until * 1e9)
        if not held:
            self.ring()

    def limit_kv(self, blocks: int) -> None:
        """Set how many blocks of its KV cache the engine may use; below 0: all."""
        self._words[_KV_BLOCKS] = _word(blocks)
        self.ring()

    def ring(self) -> None:
        """Wake the engine if it waits."""
        self._halves[2 * _BELL] = (self._halves[2 * _BELL] + 1) & 0xFFFF_FFFF
        _futex_wake(self._bell)

    # For the engine.

    @property
    def kv_blocks(self) -> int:
        return self._words[_KV_BLOCKS]

    def budget(self) -> Budget:
        """The budget of a step that begins now; empty if budget or lease has run out."""
        return self._read(self._words[_LEASE])

    def offered(self) -> Budget:
        """The guard's budget, whether or not there is a lease."""
        return self._read(_NEVER)

    def idle(self) -> bool:
        """Whether the guard's budget holds and says that nothing is inside the serving engine, with or without a lease.
        For other work in its idle time."""
        return self._read(_NEVER, idle=True).tokens > 0

    def _read(self, lease: int, *, idle: bool = False) -> Budget:
        words, now = self._words, time.monotonic_ns()
        for _ in range(_LOOKS):
            version = words[_VERSION]
            tokens, sequences, until = words[_TOKENS], words[_SEQUENCES], words[_UNTIL]
            fit = not idle or words[_IDLE] == 1
            if version == words[_VERSION] and not version & 1:
                break
        else:
            return Budget()
        until = min(until, lease)
        return (
            Budget(tokens, sequences, until / 1e9) if fit and min(tokens, sequences) > 0 and until > now else Budget()
        )

    def await_budget(self, timeout_s: float, *, kv_blocks: int | None = None) -> Budget:
        """The budget, as soon as there is one. Returns an empty one after `timeout_s`, or when the limit of blocks is
        no longer `kv_blocks`. Waiting uses no processor time."""
        end = time.monotonic() + timeout_s
        while True:
            seen = self._halves[2 * _BELL]
            budget = self.budget()
            left = end - time.monotonic()
            if budget.tokens or left <= 0 or kv_blocks not in {None, self.kv_blocks}:
                return budget
            _futex_wait(self._bell, seen, left)

    def await_ring(self, timeout_s: float) -> None:
        """Return at the next change for the engine, or after `timeout_s`."""
        _futex_wait(self._bell, self._halves[2 * _BELL], timeout_s)

    def enter(self, pid: int, kv_total: int, block_bytes: int = 0) -> None:
        """Reset the engine's part for a new engine. `pid` 0: it is not there yet."""
        for word in range(_STEPPING, _BLOCK_BYTES + 1):
            self._words[word] = 0
        self._words[_KV_BLOCKS] = -1
        self._words[_KV_TOTAL], self._words[_BLOCK_BYTES], self._words[_PID] = kv_total, block_bytes, pid

    def begin_step(self, *, heeding: bool = True) -> Budget:
        """Mark that a step begins, and return the budget that then still holds. Without a budget no step begins, unless
        the engine is not `heeding` budgets."""
        words = self._words
        if heeding and not self.budget().tokens:
            return Budget()
        last, words[_BEGAN] = words[_BEGAN], time.monotonic_ns()
        words[_STEPPING] = 1
        self._fence()
        budget = self.budget()
        if heeding and not budget.tokens:
            words[_STEPPING], words[_BEGAN] = 0, last
        return budget

    def end_step(self, scheduled: int) -> None:
        """Mark that the step ended, which took `scheduled` tokens; 0: it was no step."""
        words, now = self._words, time.monotonic_ns()
        if scheduled:
            words[_ENDED] = now
            words[_SCHEDULED] += scheduled
            words[_BUSY] += now - words[_BEGAN]
            words[_STEPS] += 1  # written last: a reader of this count finds complete sums
        words[_STEPPING] = 0

    def report(self, *, running: int, waiting: int, kv_used: int, recomputed: int) -> None:
        words = self._words
        words[_RUNNING], words[_WAITING], words[_KV_USED], words[_RECOMPUTED] = running, waiting, kv_used, recomputed

    def _fence(self) -> None:
        """Make earlier writes visible to other processes before later reads.

        The atomic operation of a lock is such a barrier on x86. On processors with weaker barriers the guard may miss a
        step that begins at the very moment of a reclaim. That step ends soon, and the next one does not begin.
        """
        with self._lock:
            pass

    def remove(self, path: Path) -> None:
        """Remove the file at `path` if it is still this page."""
        with suppress(OSError):
            if _identity(path.lstat()) == self._file:
                path.unlink()

    def close(self) -> None:
        """Unmap the page. No other method may be called afterwards."""
        self._words.release()
        self._halves.release()


def _word(value: float) -> int:
    """The value as a word; NaN becomes 0."""
    return int(min(max(value, -_MOST), _MOST)) if value == value else 0  # noqa: PLR0124 - NaN is not itself


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _mapped(descriptor: int, path: Path, *, create: bool) -> mmap.mmap:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise InvalidRequest("must be a regular file of this user", field=str(path))
    if create and status.st_size == 0:
        try:
            os.posix_fallocate(descriptor, 0, _SIZE)  # on a full disk, writers of a sparse page would get a SIGBUS
        except OSError as error:
            raise InvalidRequest(f"cannot be made: {error.strerror}", field=str(path)) from None
    elif status.st_size != _SIZE:
        raise InvalidRequest("is not a page of grants", field=str(path))
    return mmap.mmap(descriptor, _SIZE)


#: Linux allows no longer path for a socket.
_LONGEST: Final = 107


def socket_path(folder: Path) -> Path:
    """The guard's socket in the folder."""
    return folder / "guard.sock"


def page_path(folder: Path, worker_id: str) -> Path:
    """The page of one worker in the folder. `worker_id` is a checked id, so the path stays inside."""
    return folder / f"{worker_id}.page"


def seat_path(folder: Path, pid: int) -> Path:
    """The seat in the folder of one process of a trainer that takes turns: a page that the process has mapped. So a
    guard that is to kill it knows that the process id is that of a trainer, and of its own pid namespace."""
    return folder / f"{pid}.seat"


def check_folder(folder: Path, *, field: str = "grant_dir") -> None:
    """Make the folder if it does not exist. Raises `InvalidRequest` if its path is too long, or if other users have
    access to it, because its socket does not authenticate clients."""
    if len(os.fsencode(socket_path(folder))) > _LONGEST:
        raise InvalidRequest(f"{folder} is too long for a socket's path: name a shorter one", field=field)
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except OSError as error:
        raise InvalidRequest(f"{folder} cannot be used ({error.strerror}); name another", field=field) from None
    mode = stat.S_IMODE(state.st_mode)
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or mode & 0o077:
        text = f"{folder} belongs to user {state.st_uid} with mode {mode:o}; it must be this user's, with mode 700"
        raise InvalidRequest(text, field=field)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Allow one guard in a folder. Raises `InvalidRequest` naming `grant_dir` if another one runs there."""
    check_folder(folder, field="grant_dir")
    with (folder / "guard.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"another guard runs in {folder}; name another folder"
            raise InvalidRequest(text, field="grant_dir") from None
        yield


#: Linux's futex system call, by which a process waits until another changes a word of shared memory: by machine.
_NUMBERS: Final = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "s390x": 238, "riscv64": 98}
_WAIT, _WAKE = 0, 1
_ALL: Final = 2**31 - 1
#: If the system call's number is unknown, waiting polls at this interval.
_POLL_S: Final = 0.001
_number = _NUMBERS.get(platform.machine(), 0) if os.name == "posix" else 0
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _futex_wait(address: int, seen: int, timeout_s: float) -> None:
    """Return once the 32-bit word at `address` is no longer `seen`, after a `_futex_wake`, or after `timeout_s`.

    It may return early: check the condition again.
    """
    if not _number:
        time.sleep(min(_POLL_S, max(0.0, timeout_s)))
        return
    seconds = max(0.0, timeout_s)
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _libc.syscall(_number, ctypes.c_void_p(address), _WAIT, ctypes.c_uint(seen), ctypes.byref(limit), None, 0)


def _futex_wake(address: int) -> None:
    """Wake all processes that wait on the word at `address`."""
    if _number:
        with contextlib.suppress(OSError):
            _libc.syscall(_number, ctypes.c_void_p(address), _WAKE, _ALL, None, None, 0)
