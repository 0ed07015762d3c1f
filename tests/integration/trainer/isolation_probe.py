"""An environment that does as its episode is told: what hostile or broken code would do."""

import contextlib
import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from ebbtide.environments import Message, Split, StepResult


def _read(path: str) -> str:
    return Path(path).read_bytes().decode(errors="replace")


def _search(pid: str) -> str:
    """Reads what /proc shows of a process: its variables, arguments and open files."""
    root, found = Path("/proc", pid), []
    for name in ("environ", "cmdline", *(f"fd/{entry}" for entry in _entries(root / "fd"))):
        with contextlib.suppress(OSError):
            descriptor = os.open(root / name, os.O_RDONLY | os.O_NONBLOCK)  # it may be a pipe
            found.append(os.read(descriptor, 1 << 16))
            os.close(descriptor)
    return b"".join(found).decode(errors="replace")


def _entries(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []


def _search_all(_: str) -> str:
    pids = [entry for entry in _entries(Path("/proc")) if entry.isdigit() and int(entry) != os.getpid()]
    return "".join(_search(pid) for pid in pids)


def _connect(address: str) -> str:
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=1).close()
    return "connected"


def _hoard(_: str) -> str:
    hoard = []
    while True:
        hoard.append(bytearray(16 << 20))


def _loop(_: str) -> str:
    while True:
        time.sleep(0)


def _kill(pid: str) -> str:
    os.kill(int(pid), 0)
    return "may be killed"


def _orphan(_: str) -> str:
    """Leaves a process of its own behind. Returns its id."""
    reader, writer = os.pipe()
    if not os.fork():
        os.setsid()
        if orphan := os.fork():
            os.write(writer, str(orphan).encode())
        else:
            signal.pause()
        os._exit(0)
    os.wait()
    return os.read(reader, 20).decode()


_DEEDS: Final[dict[str, Callable[[str], str]]] = {
    "read": _read,
    "write": lambda path: str(Path(path).write_text("changed")),
    "search": _search,
    "search-all": _search_all,
    "variables": lambda _: str(dict(os.environ)),
    "connect": _connect,
    "segfault": lambda _: ctypes.string_at(0).decode(),
    "hoard": _hoard,
    "loop": _loop,
    "kill": _kill,
    "orphan": _orphan,
    "count": lambda _: "",
    "talk": lambda text: str(os.write(int(text), b"\xff\xff\xff\xff no frame")),
    "sockets": lambda _: next(name for name in map(str, range(3, 100)) if _is_socket(int(name))),
    "root": lambda _: str([os.setuid(0)]),  # type: ignore[func-returns-value]
}


def _is_socket(descriptor: int) -> bool:
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith("socket:")
    except OSError:
        return False


class Probe:
    def __init__(self) -> None:
        self.turns = 0

    def reset(self) -> list[Message]:
        return [Message("user", "begin")]

    def step(self, response: str) -> StepResult:
        deed, _, word = response.partition(" ")
        self.turns += 1
        return StepResult((Message("user", _DEEDS[deed](word)), Message("user", str(self.turns))))


class ProbeSource:
    identity = "probe"

    def __init__(self, params: Mapping[str, Any], seed: int) -> None:
        pass

    def make(self, split: Split, index: int) -> Probe:
        return Probe()
