"""Processes of a borrower: who they are, and making them stand still.

Invariant: a process is its pid together with its start time, so that one that got the pid of another later is never
signalled; and never this process itself, nor one of another user.
"""

import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from ebbtide.errors import InvalidRequest

_PROC = Path("/proc")


class Process(Struct, frozen=True):
    pid: int
    started: int  # clock ticks since boot


def checked(pids: Iterable[int]) -> tuple[Process, ...]:
    """The live processes of these ids. Raises `InvalidRequest` for one that is not this user's own, or this one."""
    found = []
    for pid in pids:
        if pid <= 1 or pid == os.getpid():
            raise InvalidRequest(f"{pid} is no worker's process", field="hello.pids")
        process = _find(pid)
        if process is None:
            raise InvalidRequest(f"there is no process {pid}", field="hello.pids")
        if _owner(pid) != os.getuid():
            raise InvalidRequest(f"process {pid} belongs to another user", field="hello.pids")
        found.append(process)
    return tuple(found)


def alive(process: Process) -> bool:
    """Whether it still runs, or could: a zombie does not."""
    fields = _fields(process.pid)
    return bool(fields) and int(fields[19]) == process.started and fields[0] not in "ZX"


def stopped(process: Process) -> bool:
    """Whether it was told to stand still (SIGSTOP)."""
    fields = _fields(process.pid)
    return bool(fields) and fields[0] == "T"


def send(processes: Iterable[Process], number: signal.Signals) -> int:
    """Signal these and all below them, as far as they still live and are this user's; returns how many."""
    sent = 0
    for process in with_children(processes):
        if process.pid != os.getpid() and alive(process) and _owner(process.pid) == os.getuid():
            try:
                os.kill(process.pid, number)
            except OSError:
                continue
            sent += 1
    return sent


def with_children(processes: Iterable[Process]) -> Iterator[Process]:
    """These and all below them, each once, parents first."""
    below: dict[int, list[Process]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdecimal() and (fields := _fields(int(entry.name))):
            below.setdefault(int(fields[1]), []).append(Process(int(entry.name), int(fields[19])))
    seen: set[Process] = set()
    line = list(processes)
    for process in line:
        if process not in seen and alive(process):
            seen.add(process)
            yield process
            line.extend(below.get(process.pid, ()))


def _find(pid: int) -> Process | None:
    fields = _fields(pid)
    return Process(pid, int(fields[19])) if fields and fields[0] not in "ZX" else None


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
