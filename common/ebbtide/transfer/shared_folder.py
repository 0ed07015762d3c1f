"""Shares a mirror's files in memory among one user's processes; the last of them removes the files.

Invariant: the folder and all in it belong to this user, and no other may enter. Files are opened through descriptors of
checked folders, never by a path again. A process that uses a mirror's files holds a shared lock on its `users`, which
ends with the process. So files whose lock is free have no user, and the next process to start reuses or sweeps them. To
reuse them it first puts `UNCHECKED` beside them: no process believes them until one has checked them.
"""

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from ebbtide.errors import EbbtideError, InvalidRequest, NoCapacity

#: The setting that names the folder, for errors.
SETTING: Final = "mirror_dir"
#: Lies beside files that had no user.
UNCHECKED: Final = "unchecked"
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_ROOM: Final = {errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT, errno.EMFILE, errno.ENFILE}
_NAME: Final = re.compile(r"mirror-[0-9a-f]{32}")
#: All files that a sub-folder may have, in the order of their removal.
_FILES: Final = ("versions.new", "versions", "changes.new", "changes", "weights", "digests", UNCHECKED, "users")


class SharedFolder:
    """A sub-folder of `folder` for mirrors with the same `made`, which this process uses until `leave`."""

    def __init__(self, folder: Path, made: bytes) -> None:
        """Make or join it, and sweep files without a user. Raises `InvalidRequest` for another user's folder."""
        self._folder, self._name = folder, f"mirror-{made[:16].hex()}"
        while (joined := _join(folder, self._name)) is None:
            pass  # the last user was just leaving
        self._top, self._inner, self._users = joined

    def open(self, name: str) -> int:
        """Open one of the files, and make it if there is none."""
        return _create(name, self._inner)

    def find(self, name: str) -> int | None:
        """Open one of the files; None if there is none."""
        try:
            return os.open(name, _FILE, dir_fd=self._inner)
        except FileNotFoundError:
            return None

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new, src_dir_fd=self._inner, dst_dir_fd=self._inner)

    def drop(self, name: str) -> bool:
        """Remove one of the files. Returns whether there was one."""
        try:
            os.unlink(name, dir_fd=self._inner)
        except FileNotFoundError:
            return False
        return True

    def leave(self) -> None:
        """End this process's use; the last user removes the files."""
        if _is_free(self._users):
            _remove(self._top, self._name, self._inner)
            with suppress(OSError):  # others' mirrors may be in it, or it may be a mount
                self._folder.rmdir()
        _close((self._users, self._inner, self._top))


def _join(folder: Path, name: str) -> tuple[int, int, int] | None:
    """Descriptors of the folder, the sub-folder and its `users`, locked; None if the last user was just leaving."""
    opened = [_open_top(folder)]
    try:
        _sweep(opened[0], name)
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=opened[0])
        opened.append(os.open(name, _FOLDER, dir_fd=opened[0]))
        opened.append(_create("users", opened[1]))
        top, inner, users = opened
        if _is_free(users):
            os.close(_create(UNCHECKED, inner))
        fcntl.flock(users, fcntl.LOCK_SH)  # waits a moment for a process that removes all
        if os.stat("users", dir_fd=inner).st_ino == os.fstat(users).st_ino:
            return top, inner, users
    except FileNotFoundError:
        pass  # the last user removed it between two steps: begin again
    except OSError as error:
        _close(opened)
        raise refused(folder, error) from None
    _close(opened)
    return None


def _create(name: str, folder: int) -> int:
    """Open a file, and make it if there is none."""
    return os.open(name, _FILE | os.O_CREAT, 0o600, dir_fd=folder)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def check_folder(folder: Path) -> None:
    """Make a folder of mirrors if there is none. Raises `InvalidRequest` if it is not this user's alone."""
    os.close(_open_top(folder))


def reserve(file: int, size: int, where: str) -> None:
    """Reserve `size` bytes of memory for a file. Raises `NoCapacity`, where a later write would be a SIGBUS."""
    try:
        os.ftruncate(file, size)
        if size:
            os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        os.ftruncate(file, 0)
        text = f"{SETTING}: {where} has no room for {size} bytes of weights; free some, or name another folder"
        raise NoCapacity(text, retry_after_s=10.0) from None


def _open_top(folder: Path) -> int:
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        top = os.open(folder, _FOLDER)
    except OSError as error:
        raise refused(folder, error) from None
    state = os.fstat(top)
    if state.st_uid != os.geteuid() or stat.S_IMODE(state.st_mode) & 0o077:
        os.close(top)
        text = f"{folder} belongs to user {state.st_uid} with mode {stat.S_IMODE(state.st_mode):o}; "
        raise InvalidRequest(text + "it must be this user's, with mode 700", field=SETTING)
    return top


def _sweep(top: int, mine: str) -> None:
    """Remove unused files of other geometries."""
    for name in os.listdir(top):
        if name == mine or not _NAME.fullmatch(name):
            continue
        try:
            inner = os.open(name, _FOLDER, dir_fd=top)
        except OSError:
            continue  # gone, or none of ours
        try:
            _sweep_one(top, name, inner)
        finally:
            os.close(inner)


def _sweep_one(top: int, name: str, inner: int) -> None:
    try:
        users = os.open("users", _FILE, dir_fd=inner)
    except FileNotFoundError:
        with suppress(OSError):
            os.rmdir(name, dir_fd=top)  # empty; a process that is just making it makes it again
        return
    try:
        if _is_free(users):
            _remove(top, name, inner)
    finally:
        os.close(users)


def _is_free(users: int) -> bool:
    """Whether there is no other user; if so, there can be none until `users` is closed."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(top: int, name: str, inner: int) -> None:
    for file in _FILES:  # `users` last: a process that waits for its lock finds it gone, and begins again
        with suppress(FileNotFoundError):
            os.unlink(file, dir_fd=inner)
    with suppress(OSError):
        os.rmdir(name, dir_fd=top)


def refused(folder: Path, error: OSError) -> EbbtideError:
    """Turn an error of the files in `folder` into one for its user."""
    if error.errno in _NO_ROOM:
        text = f"{SETTING}: {folder} has no room ({error.strerror}); free some, or name another folder"
        return NoCapacity(text, retry_after_s=10.0)
    text = f"{folder} cannot be used ({error.strerror}): name a folder that is this user's alone"
    return InvalidRequest(text, field=SETTING)
