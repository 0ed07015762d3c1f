"""A real redis-server of one's own.

Invariant: the data lies in `directory` and survives `stop`, `kill` and a new `start`. The server is a child process:
who made this object ends it.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from ebbtide.errors import StoreUnavailable
from ebbtide.redis_server import redis_command

#: A unix socket's path must fit into 108 bytes.
_MAX_SOCKET_PATH: Final = 100


class EmbeddedRedis:
    """Started with `with` or `start()`; `url` is for `redis.asyncio.from_url`."""

    def __init__(self, directory: Path | None = None) -> None:
        self._temporary = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="ebbtide-redis-"))
        self.directory.mkdir(parents=True, exist_ok=True)
        self.socket = self.directory / "redis.sock"
        self._short: Path | None = None
        if len(str(self.socket)) > _MAX_SOCKET_PATH:
            self._short = Path(tempfile.mkdtemp(prefix="ebb-"))
            self.socket = self._short / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise StoreUnavailable("this redis-server is not running")
        return self._process.pid

    def start(self, timeout: float = 30.0) -> Self:
        """Start it and wait until it answers, its data loaded. Raises `StoreUnavailable` with its log otherwise."""
        self.socket.unlink(missing_ok=True)
        log = self.directory / "redis.log"
        with log.open("ab") as out:
            command = redis_command(self.directory, self.socket)
            self._process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        end = time.monotonic() + timeout
        while self._process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError):
                if self.command("PING") == b"+PONG\r\n":
                    return self
            time.sleep(0.01)
        self.kill()
        raise StoreUnavailable(f"redis-server did not start:\n{log.read_text(errors='replace')[-2000:]}")

    def command(self, *words: str) -> bytes:
        """The raw answer (its first 64 KiB) to one command; for a few words of housekeeping, not for data."""
        request = b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w.encode()), w.encode()) for w in words)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5.0)
            connection.connect(str(self.socket))
            connection.sendall(request)
            return connection.recv(1 << 16)

    def stop(self) -> None:
        """SIGTERM, and wait."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Kill it and delete what is only its own."""
        self.kill()
        for path in (self._short, self.directory if self._temporary else None):
            if path:
                shutil.rmtree(path, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(30)
            self._process = None
