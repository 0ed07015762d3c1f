"""Tells how long the processes of a scoring waited for a CPU, so that a busy host is not taken for a slow answer.

Linux counts for each task how long it could have run and did not (`/proc/PID/task/TID/schedstat`, second number, in
nanoseconds). Processes that end take their count along, and where the host has no such file nothing is known. So the
wait may be told too short, and never too long.
"""

from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")


class CpuWaits:
    """Watches a process and all that descend from it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = _waits(pid)

    def since_s(self) -> float:
        """Seconds that one task, the one that waited longest, waited since this was made."""
        return max((wait - self._before.get(task, 0) for task, wait in _waits(self._pid).items()), default=0) / 1e9


def _waits(pid: int) -> dict[int, int]:
    """Task -> nanoseconds, of a process and its descendants. Those that end meanwhile are left out."""
    found: dict[int, int] = {}
    pids = [pid]
    while pids:
        for task in _tasks(pids.pop()):
            try:
                found[int(task.name)] = int((task / "schedstat").read_text().split()[1])
                pids += map(int, (task / "children").read_text().split())
            except (OSError, ValueError, IndexError):
                continue
    return found


def _tasks(pid: int) -> list[Path]:
    try:
        return list((_PROC / str(pid) / "task").iterdir())
    except OSError:
        return []
