"""Starts, kills and freezes a server process for tests."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from ebbtide.errors import StoreUnavailable
from tests.support import tied_program


class ServerProcess:
    """A child process that speaks Redis' protocol at `address` (a path or a loopback port) and logs to `log`.

    Start it with `with` or `start()`. The owner of this object ends it.
    """

    def __init__(self, address: Path | int, log: Path, *, tied: bool = False) -> None:
        """`tied`: the kernel kills it when the thread that started it ends, however that ends."""
        self.address, self._log, self._tied = address, log, tied
        self._process: subprocess.Popen[bytes] | None = None

    def _command_line(self) -> list[str]:
        raise NotImplementedError

    @property
    def pid(self) -> int:
        if self._process is None:
            raise StoreUnavailable("this redis-server is not running; start it")
        return self._process.pid

    def start(self, timeout: float = 30.0) -> Self:
        """Start it, and wait until it has loaded its data and answers. Else raises `StoreUnavailable` with its log."""
        if isinstance(self.address, Path):
            self.address.unlink(missing_ok=True)
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                [*(_tie() if self._tied else ()), *self._command_line()], stdout=out, stderr=subprocess.STDOUT
            )
        end = time.monotonic() + timeout
        while self._process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError):
                if self.command("PING") == b"+PONG\r\n":
                    return self
            time.sleep(0.01)
        self.kill()
        raise StoreUnavailable(f"redis-server did not start:\n{self._log.read_text(errors='replace')[-2000:]}")

    def command(self, *words: str) -> bytes:
        """The first 64 KiB of the raw answer to one command: for housekeeping, not for data."""
        request = b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w.encode()), w.encode()) for w in words)
        local = isinstance(self.address, Path)
        with socket.socket(socket.AF_UNIX if local else socket.AF_INET) as connection:
            connection.settimeout(5.0)
            connection.connect(str(self.address) if local else ("127.0.0.1", self.address))
            connection.sendall(request)
            return connection.recv(1 << 16)

    def stop(self) -> None:
        """Send SIGTERM, and wait."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, and wait."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        self.kill()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(30)
            self._process = None


def _tie() -> list[str]:
    return [sys.executable, "-I", "-S", tied_program.__file__, str(os.getpid())]
