"""One service as a process of its own, to be ended and started again."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ebbtide.free_ports import free_port
from tests.support.waiting import wait_until

TOKEN: Final = "a-token-of-tests"
PROOF: Final = {"EBBTIDE_TOKEN": TOKEN}


class ServiceProcess:
    """One service as its own process; started again, it listens where it did."""

    def __init__(
        self, name: str, directory: Path, *flags: str, listens: bool = True, proof: Mapping[str, str] = PROOF
    ) -> None:
        """`proof`: variables by which it proves itself, and tells callers apart."""
        self._name, self._flags, self._listens, self._proof = name, flags, listens, proof
        self._ready = directory / f"{name}.json"
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"127.0.0.1:{free_port()}"  # connections take none of these while it is down

    async def start(self, *more: str) -> str:
        """Where it listens. `more`: flags of this start alone."""
        self._ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", f"ebbtide.{self._name}", *self._flags, *more, "--ready-file", str(self._ready)]
        command += ["--server-listen", self.address] if self._listens else []
        self._process = subprocess.Popen(command, env={**os.environ, **self._proof}, stdout=subprocess.DEVNULL)  # noqa: ASYNC220
        await wait_until(self._ready.exists, timeout=30, what=self._name)
        self.address = json.loads(self._ready.read_text())["address"]
        return self.address

    def end(self, how: signal.Signals = signal.SIGTERM) -> int | None:
        """What it ended with; None if it was never started."""
        if self._process is None:
            return None
        if self._process.poll() is None:
            self._process.send_signal(how)
        return self._process.wait(20)
