"""The folder that a serving-guard and the workers beside it share: the guard's socket, and a page for each worker."""

import os
import stat
from pathlib import Path
from typing import Final

from ebbtide.errors import InvalidRequest

#: The longest path that a socket of Linux may have.
_LONGEST: Final = 107


def socket_path(folder: Path) -> Path:
    """The guard's socket there."""
    return folder / "guard.sock"


def page_path(folder: Path, worker_id: str) -> Path:
    """The page of one worker there. `worker_id` is a checked id, so it names no other folder."""
    return folder / f"{worker_id}.page"


def check_folder(folder: Path, *, field: str = "grant_dir") -> None:
    """Make the folder, if need be. Raises `InvalidRequest` if it is not this user's alone, for its socket asks nobody
    who he is, or if its path is too long."""
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
