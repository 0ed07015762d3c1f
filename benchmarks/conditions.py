"""Under which conditions a benchmark ran: without them its figures say nothing."""

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]


def conditions() -> dict[str, Any]:
    """The machine, the software and the commit; `load` is the machine's mean load of the last minute before. Without
    `numba` the kernels for patches are numpy's."""
    return {
        **commit(_ROOT),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        "load": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "grpcio": _version("grpcio"),
        "numba": _version("numba"),
    }


def commit(checkout: Path) -> dict[str, Any]:
    """The commit of a checkout."""
    return {
        "commit": _git(checkout, "rev-parse", "--short=12", "HEAD") or "unknown",
        "uncommitted_changes": bool(_git(checkout, "status", "--porcelain", "--untracked-files=no")),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(checkout: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=checkout, capture_output=True, text=True, check=False)
    except OSError:  # there is no git here
        return ""
    return done.stdout.strip()


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
