"""Processes of a borrower: who they are, and making them stand still.

Invariant: a process is its pid together with its start time, so that one that got the pid of another later is never
signalled; and never this process itself, nor one of another user, nor one that has nothing to do with the page that
its worker borrows by: a pid of another namespace, or an old one, may be anybody's.
"""

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from ebbtide.errors import InvalidRequest

_PROC = Path("/proc")


class BorrowerProcess(Struct, frozen=True):
    pid: int
    started: int  # clock ticks since boot


def checked(pids: Iterable[int], page: Path) -> tuple[BorrowerProcess, ...]:
    """The live processes of these ids, parents first. Raises `InvalidRequest` for one that is not this user's own, or
    this one, or neither has mapped `page` nor is below one named before it that has."""
    found: list[BorrowerProcess] = []
    for pid in pids:
        if pid <= 1 or pid == os.getpid():
            raise InvalidRequest(f"{pid} is no worker's process", field="hello.pids")
        process = _find(pid)
        if process is None:
            raise InvalidRequest(f"there is no process {pid}", field="hello.pids")
        if _owner(pid) != os.getuid():
            raise InvalidRequest(f"process {pid} belongs to another user", field="hello.pids")
        if _parent(pid) not in {one.pid for one in found} and not _maps(pid, page):
            message = (
                f"process {pid} has not mapped {page.name}: run worker and guard in one pid namespace, as one user"
            )
            raise InvalidRequest(message, field="hello.pids")
        found.append(process)
    return tuple(found)


def alive(process: BorrowerProcess) -> bool:
    """Whether it still runs, or could: a zombie does not."""
    fields = _fields(process.pid)
    return bool(fields) and int(fields[19]) == process.started and fields[0] not in "ZX"


def stopped(process: BorrowerProcess) -> bool:
    """Whether it was told to stand still (SIGSTOP)."""
    fields = _fields(process.pid)
    return bool(fields) and fields[0] == "T"


def send(processes: Iterable[BorrowerProcess], number: signal.Signals) -> int:
    """Signal these and all below them, as far as they still live and are this user's; returns how many."""
    return sum(_signal(process, number) for process in list(with_children(processes)))


def with_children(processes: Iterable[BorrowerProcess]) -> Iterator[BorrowerProcess]:
    """These and all below them, each once, parents first."""
    seen: set[BorrowerProcess] = set()
    line = list(processes)
    for process in line:
        if process not in seen and alive(process):
            seen.add(process)
            yield process
            line.extend(child for pid in _children(process.pid) if (child := _find(pid)) is not None)


def _signal(process: BorrowerProcess, number: signal.Signals) -> bool:
    """By a descriptor of the process, where the kernel has those: its pid may become another's in between."""
    if process.pid == os.getpid():
        return False
    descriptor = None
    with suppress(OSError):
        descriptor = os.pidfd_open(process.pid)
    try:
        if not alive(process) or _owner(process.pid) != os.getuid():
            return False
        if descriptor is None:
            os.kill(process.pid, number)
        else:
            signal.pidfd_send_signal(descriptor, number)
    except OSError:
        return False
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return True


def _children(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            with suppress(OSError):  # a thread may end meanwhile
                yield from map(int, (task / "children").read_text().split())


def _maps(pid: int, page: Path) -> bool:
    """Whether its memory holds the file: the same inode (which some overlays tell otherwise), or the same path."""
    path = page.resolve()
    try:
        inode = str(path.stat().st_ino)
        lines = (_PROC / str(pid) / "maps").read_text(errors="replace").splitlines()
    except OSError:
        return False
    fields = (line.split(maxsplit=5) for line in lines if line.endswith(path.name))
    return any(len(found) == 6 and (found[4] == inode or found[5] == str(path)) for found in fields)


def _parent(pid: int) -> int:
    fields = _fields(pid)
    return int(fields[1]) if fields else 0


def _find(pid: int) -> BorrowerProcess | None:
    fields = _fields(pid)
    return BorrowerProcess(pid, int(fields[19])) if fields and fields[0] not in "ZX" else None


def _fields(pid: int) -> list[str]:
    """State, parent and so on of proc(5)'s stat, behind the name, which may hold anything; none if it is gone."""
    try:
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _owner(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return -1
    return next((int(line.split()[1]) for line in lines if line.startswith("Uid:")), -1)
