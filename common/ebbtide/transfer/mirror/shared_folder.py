"""Files in shared memory that the processes of one user have in common, and that the last of them removes.

Invariant: the folder and all in it belong to this user, and no other may enter; all is opened through descriptors of
folders that were checked, never by a path again. Who uses a mirror's files holds a shared lock on its `users`, which
ends with the process: so files whose lock is free are nobody's, and the next starter reuses or sweeps them. Who reuses
them puts `UNCHECKED` beside them first: what lay there unwatched is believed by nobody before somebody has seen to it.
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

#: What the errors call the folder: the setting that names it.
SETTING: Final = "mirror_dir"
#: Lies beside files that were nobody's.
UNCHECKED: Final = "unchecked"
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_ROOM: Final = {errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT, errno.EMFILE, errno.ENFILE}
_NAME: Final = re.compile(r"mirror-[0-9a-f]{32}")
#: All that ever lies in a sub-folder, in the order in which it is removed.
_FILES: Final = ("versions.new", "versions", "changes.new", "changes", "weights", "digests", UNCHECKED, "users")


class SharedFolder:
    """A sub-folder of `folder` for mirrors that are `made` alike, and this process's part in it until `leave`."""

    def __init__(self, folder: Path, made: bytes) -> None:
        """Make or join it, and sweep what others left behind. Raises `InvalidRequest` for a folder that is not ours."""
        self._folder, self._name = folder, f"mirror-{made[:16].hex()}"
        while (joined := _join(folder, self._name)) is None:
            pass  # somebody was just leaving
        self._top, self._inner, self._users = joined

    def open(self, name: str) -> int:
        """A descriptor of one of the files, which is made empty if it is not there."""
        return _create(name, self._inner)

    def find(self, name: str) -> int | None:
        """A descriptor of one of the files, or None."""
        try:
            return os.open(name, _FILE, dir_fd=self._inner)
        except FileNotFoundError:
            return None

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new, src_dir_fd=self._inner, dst_dir_fd=self._inner)

    def drop(self, name: str) -> bool:
        """Remove one of the files; whether it was there."""
        try:
            os.unlink(name, dir_fd=self._inner)
        except FileNotFoundError:
            return False
        return True

    def leave(self) -> None:
        """End this process's part; the last one removes the files."""
        if _is_free(self._users):
            _remove(self._top, self._name, self._inner)
            with suppress(OSError):  # others' mirrors may be in it, or it may be a mount
                self._folder.rmdir()
        _close((self._users, self._inner, self._top))


def _join(folder: Path, name: str) -> tuple[int, int, int] | None:
    """Descriptors of the folder, the sub-folder and its `users`, locked; None if the last one was just leaving."""
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
        fcntl.flock(users, fcntl.LOCK_SH)  # held otherwise by one who removes all, for a moment
        if os.stat("users", dir_fd=inner).st_ino == os.fstat(users).st_ino:
            return top, inner, users
    except FileNotFoundError:
        pass  # removed between two steps by the last who left: begin again
    except OSError as error:
        _close(opened)
        raise refused(folder, error) from None
    _close(opened)
    return None


def _create(name: str, folder: int) -> int:
    """A descriptor of a file, which is made empty if it is not there."""
    return os.open(name, _FILE | os.O_CREAT, 0o600, dir_fd=folder)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def check_folder(folder: Path) -> None:
    """Make a folder of mirrors, if need be. Raises `InvalidRequest` if it is not this user's alone."""
    os.close(_open_top(folder))


def reserve(file: int, size: int, where: str) -> None:
    """Give a file `size` bytes of memory of its own. Raises `NoCapacity` where a later write would be a SIGBUS."""
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
    """Remove the files of other geometries that nobody uses."""
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
            os.rmdir(name, dir_fd=top)  # empty; one who is just making it makes it again
        return
    try:
        if _is_free(users):
            _remove(top, name, inner)
    finally:
        os.close(users)


def _is_free(users: int) -> bool:
    """Whether nobody else has a part; if so, none can have one until `users` is closed."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(top: int, name: str, inner: int) -> None:
    for file in _FILES:  # `users` last: who waits for its lock finds that it is gone, and begins again
        with suppress(FileNotFoundError):
            os.unlink(file, dir_fd=inner)
    with suppress(OSError):
        os.rmdir(name, dir_fd=top)


def refused(folder: Path, error: OSError) -> EbbtideError:
    """What an error of the files in `folder` means to who wants a mirror there."""
    if error.errno in _NO_ROOM:
        text = f"{SETTING}: {folder} has no room ({error.strerror}); free some, or name another folder"
        return NoCapacity(text, retry_after_s=10.0)
    text = f"{folder} cannot be used ({error.strerror}): name a folder that is this user's alone"
    return InvalidRequest(text, field=SETTING)
