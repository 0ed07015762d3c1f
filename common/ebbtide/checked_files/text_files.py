"""Reads files of text that somebody named, and refuses those that are none."""

import os
import stat
from pathlib import Path

from ebbtide.checked_files.refusals import FileRefused, Problem, UnreadableFile


def read_text(path: Path, name: str, *, most_bytes: int, pipes: bool = False) -> str:
    """Read a regular file in UTF-8, or with `pipes` a pipe to its end. Raises `FileRefused` naming the file as `name`.

    If there is no such file, or it is too large, that is an `UnreadableFile`.
    """
    try:
        # Pipes and devices could block, or never end: the file is opened without waiting and looked at first.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if pipes else os.O_NONBLOCK))
        try:
            mode = os.fstat(handle).st_mode
            regular = stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode))
            data = _read(handle, most_bytes + 1) if regular else b""
        finally:
            os.close(handle)
    except (OSError, ValueError) as error:
        told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _unreadable(name, f"cannot be read ({told}); check its path and permissions") from None
    if not regular:
        raise _unreadable(name, "is no regular file; name a file of text")
    if len(data) > most_bytes:
        raise _unreadable(name, f"is larger than {most_bytes} bytes; leave out what is not needed")
    return _decoded(data, name)


def _read(handle: int, most_bytes: int) -> bytes:
    parts: list[bytes] = []
    while most_bytes > 0 and (part := os.read(handle, most_bytes)):
        parts.append(part)
        most_bytes -= len(part)
    return b"".join(parts)


def _decoded(data: bytes, name: str) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise _refused(name, "is encoded in UTF-16; save it in UTF-8")
    try:
        text = data.removeprefix(b"\xef\xbb\xbf").decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise _refused(name, "is not encoded in UTF-8; save it in UTF-8", line, column) from None
    if (at := text.find("\0")) >= 0:
        raise _refused(
            name, "has a NUL character; take it out", text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
        )
    return text


def _refused(name: str, text: str, line: int = 1, column: int = 0) -> FileRefused:
    return FileRefused([Problem(name, line, column, "", text)])


def _unreadable(name: str, text: str) -> UnreadableFile:
    return UnreadableFile([Problem(name, 0, 0, "", text)])
