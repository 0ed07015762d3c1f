"""Checks the folder that a serving-guard shares with its workers, and names the socket and the pages in it."""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ebbtide.errors import InvalidRequest

#: Linux allows no longer path for a socket.
_LONGEST: Final = 107


def socket_path(folder: Path) -> Path:
    """The guard's socket in the folder."""
    return folder / "guard.sock"


def page_path(folder: Path, worker_id: str) -> Path:
    """The page of one worker in the folder. `worker_id` is a checked id, so the path stays inside."""
    return folder / f"{worker_id}.page"


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
