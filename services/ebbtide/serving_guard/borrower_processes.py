"""Identifies and signals a borrower's processes.

Invariant: a process is identified by its pid and its start time, so a process that got an old pid later is never
signalled. Nor is this process itself, a process of another user, or one that is unrelated to the worker's page: a pid
that is old or from another namespace may belong to any process.
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
    """The live processes with these ids, parents first. Raises `InvalidRequest` for another user's process, for this
    process, and for one that has not mapped `page` and is no child of an earlier one in `pids`."""
    found: list[BorrowerProcess] = []
    for pid in pids:
        if pid <= 1 or pid == os.getpid():
            raise InvalidRequest(f"{pid} is not a worker's process", field="hello.pids")
        process = _find(pid)
        if process is None:
            raise InvalidRequest(f"there is no process {pid}", field="hello.pids")
        if _owner(pid) != os.getuid():
            raise InvalidRequest(f"process {pid} belongs to another user", field="hello.pids")
        if _parent(pid) not in {one.pid for one in found} and not _maps(pid, page):
            message = (
                f"process {pid} has not mapped {page.name}: run worker and lender in one pid namespace, as one user"
            )
            raise InvalidRequest(message, field="hello.pids")
        found.append(process)
    return tuple(found)


def alive(process: BorrowerProcess) -> bool:
    """Whether the process exists and is not a zombie."""
    fields = _fields(process.pid)
    return bool(fields) and int(fields[19]) == process.started and fields[0] not in "ZX"


def stopped(process: BorrowerProcess) -> bool:
    """Whether the process is stopped (SIGSTOP)."""
    fields = _fields(process.pid)
    return bool(fields) and fields[0] == "T"


def send(processes: Iterable[BorrowerProcess], number: signal.Signals) -> int:
    """Signal these processes and all their descendants that live and are this user's; returns how many."""
    return sum(_signal(process, number) for process in list(with_children(processes)))


def core_waits(processes: Iterable[BorrowerProcess]) -> dict[int, float]:
    """Seconds that each thread of these processes has been ready and waited for a core, by thread id. Empty where the
    kernel does not count them."""
    found: dict[int, float] = {}
    for process in processes:
        with suppress(OSError):
            for task in (_PROC / str(process.pid) / "task").iterdir():
                with suppress(OSError, ValueError, IndexError):  # a thread may end meanwhile
                    found[int(task.name)] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return found


def with_children(processes: Iterable[BorrowerProcess]) -> Iterator[BorrowerProcess]:
    """These processes and all their descendants, each once, parents first."""
    seen: set[BorrowerProcess] = set()
    found = list(processes)
    for process in found:
        if process not in seen and alive(process):
            seen.add(process)
            yield process
            found.extend(child for pid in _children(process.pid) if (child := _find(pid)) is not None)


def _signal(process: BorrowerProcess, number: signal.Signals) -> bool:
    """Signal by a descriptor of the process if the kernel supports it, because its pid may be reused in between."""
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
    """Whether the process has mapped the file: by inode, or by path where an overlay reports another inode."""
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
    """The fields of proc(5)'s stat after the name, which may hold any character; empty if the process is gone."""
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
