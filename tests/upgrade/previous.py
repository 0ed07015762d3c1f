"""The code of another revision, beside this one: taken from the history, its contract compiled, run by this Python."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from ebbtide.reference.registered_metrics import ROOT

#: Names the revision to upgrade from, and to roll back to.
VARIABLE: Final = "EBBTIDE_PREVIOUS"


class Previous:
    """`environment` makes a program of this checkout's command line run that revision's code instead."""

    def __init__(self, revision: str, folder: Path) -> None:
        """Raises `subprocess.CalledProcessError`."""
        self.revision, self.folder = revision, folder
        archive = folder.with_suffix(".tar")
        folder.mkdir()
        _git("archive", "--output", str(archive), revision)
        subprocess.run(["tar", "-xf", archive, "-C", folder], check=True)
        archive.unlink()
        self._compile()
        roots = [folder / "common", folder / "services", folder / "lab", folder]
        # Behind these the checkout's own roots still stand, but each package is found in the first that has it.
        self.environment = {"PYTHONPATH": os.pathsep.join(map(str, roots)), "PYTHONSAFEPATH": "1"}

    def _compile(self) -> None:
        from grpc_tools import protoc

        protos, out = self.folder / "protos", self.folder / "common"
        sources = [str(path) for path in sorted(protos.rglob("*.proto"))]
        known = Path(protoc.__file__).parent / "_proto"
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{protos}", f"-I{known}"]
        subprocess.run([*command, f"--python_out={out}", f"--grpc_python_out={out}", *sources], check=True)

    def foreign_modules(self, *modules: str) -> list[str]:
        """What these modules, imported as that revision's, bring in from any other Ebbtide."""
        code = (
            "import importlib, sys\n"
            f"for name in {modules!r}: importlib.import_module(name)\n"
            "for name, module in list(sys.modules.items()):\n"
            "    if name.partition('.')[0] in ('ebbtide', 'tests') and getattr(module, '__file__', None):\n"
            "        print(module.__file__)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=True,
        )
        files = done.stdout.splitlines()
        assert len(files) > len(modules)
        return [file for file in files if not Path(file).is_relative_to(self.folder)]


def find_previous(folder: Path) -> Previous:
    """The revision that `EBBTIDE_PREVIOUS` names, else the commit before this one. Skips where there is no history."""
    named = os.environ.get(VARIABLE, "")
    try:
        revision = _git("rev-parse", "--verify", "--quiet", f"{named or 'HEAD~1'}^{{commit}}")
    except (OSError, subprocess.CalledProcessError):
        if named:
            raise
        pytest.skip(f"no commit before this one is at hand; name a revision by {VARIABLE} in a clone with its history")
    return Previous(revision, folder / f"at-{revision[:12]}")


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()
