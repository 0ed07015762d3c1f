"""A user's program and commands from a wheel: an environment of their own, and of the checkout a copied file.

The wheel is built here from what a user would clone, and is installed with the extra `cli`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.compose.podman import Failed

EXAMPLE: Final = "submit_and_watch.py"
_INSTALL_S: Final = 600.0
_COMMAND_S: Final = 120.0
#: A user's environment has these of ours, and pip's settings while it installs.
_KEPT: Final = ("PATH", "HOME", "LANG", "SSL_CERT_FILE")


class WheelUser:
    """`install` comes first. `folder` is empty; `cluster` has the variables that say where the cluster is."""

    def __init__(self, folder: Path, checkout: Path) -> None:
        self._folder, self._checkout, self._bin = folder, checkout, folder / "venv" / "bin"
        self._environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        self._complaints = folder / "stderr"
        folder.mkdir()

    def install(self) -> None:
        """Raises `Failed`."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("EBBTIDE_", "PYTHON"))}
        pip, dist = str(self._bin / "pip"), self._folder / "dist"
        for command in (
            [sys.executable, "-m", "venv", str(self._folder / "venv")],
            [pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(dist), str(self._checkout)],
        ):
            _run(command, inherited, self._folder, _INSTALL_S)
        (wheel,) = dist.glob("ebbtide-*.whl")
        _run([pip, "install", "--quiet", f"ebbtide[cli] @ file://{wheel}"], inherited, self._folder, _INSTALL_S)
        shutil.copy(self._checkout / "examples" / EXAMPLE, self._folder)

    def know(self, **cluster: str) -> None:
        """Where the cluster is, and the token."""
        self._environment |= cluster

    def command(self, *words: str) -> str:
        """What `ebbtide WORDS` prints. Raises `Failed`."""
        return _run([str(self._bin / "ebbtide"), *words], self._environment, self._folder, _COMMAND_S)

    def watch(self, spec: str) -> "subprocess.Popen[str]":
        """Start the example, which submits a run and follows it. Its output goes to a pipe; see `complained`."""
        (self._folder / "run.toml").write_text(spec)
        with self._complaints.open("w") as complaints:
            return subprocess.Popen(
                [str(self._bin / "python"), EXAMPLE, "run.toml"],
                env=self._environment,
                cwd=self._folder,
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
            )

    def complained(self) -> str:
        """The end of what the example wrote to its stderr, which libraries may warn on."""
        return self._complaints.read_text()[-2000:]


def _run(command: list[str], environment: dict[str, str], folder: Path, timeout_s: float) -> str:
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    if done.returncode:
        raise Failed(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}"[-3000:])
    return done.stdout
