"""The page of shared memory between a serving-guard and the engine that borrows from it."""

from pathlib import Path

from ebbtide.grants.page import Page, Stepping

__all__ = ["Page", "Stepping", "page_path", "socket_path"]


def socket_path(folder: Path) -> Path:
    """The guard's socket in the folder that guard and workers share."""
    return folder / "guard.sock"


def page_path(folder: Path, worker_id: str) -> Path:
    """The page of one worker there. `worker_id` is a checked id, so it names no other folder."""
    return folder / f"{worker_id}.page"
