"""Clocks that tests set: of objects that take one, and of programs that start with `environment` (faketime.c)."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

_SOURCE: Final = Path(__file__).with_name("faketime.c")


def compiler() -> str | None:
    """The C compiler of this machine, if it has one."""
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


class SetClock:
    """Stands still until a test sets `now`, in seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class JumpingClock:
    """One clock, shared by all who are started with its `environment`. It is right until it jumps."""

    def __init__(self, directory: Path) -> None:
        """Compiles what the programs load, into `directory`. Needs `compiler()`."""
        self._offset = directory / "clock"
        self._library = directory / "faketime.so"
        self.jump(0)
        command = [compiler() or "cc", "-O1", "-shared", "-fPIC", "-o", str(self._library), str(_SOURCE), "-ldl"]
        subprocess.run(command, check=True)

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "EBBTIDE_CLOCK_FILE": str(self._offset)}

    def jump(self, seconds: int) -> None:
        """From now on the clock says the true time plus `seconds`."""
        fresh = self._offset.with_suffix(".new")
        fresh.write_text(str(seconds))
        fresh.replace(self._offset)
