"""Checks a run before it is submitted: its spec, model, trainer and environment, in this order."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from ebbtide.client.client import read_spec
from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.types.run import RunSpec, check_spec, to_mapping

_REFUSED: Final = 2
_NOT_INSTALLED: Final = 3


def check(path: Path, *, deep: bool = True) -> RunSpec:
    """Returns the spec in the TOML file at `path`. Raises `InvalidRequest` naming the field.

    `deep` also has the trainer, in its own process, make the environment, read the model and compare lengths with its
    context. The model's path becomes absolute then: services may run in another directory.
    """
    spec = check_spec(read_spec(path))
    if not deep:
        return spec
    check_deeply(spec)
    return msgspec.structs.replace(spec, model=str(Path(spec.model).resolve()))


def check_deeply(spec: RunSpec, patience_s: float = 120.0) -> None:
    """Raises `InvalidRequest` for a model, trainer or environment that an installed trainer refuses, and for an
    environment that takes longer than `patience_s` seconds."""
    with tempfile.TemporaryDirectory(prefix="ebbtide-") as folder:
        file = Path(folder) / "spec.json"
        file.write_text(json.dumps(to_mapping(spec)))
        command = [sys.executable, "-m", "ebbtide.trainer.trainer_preflight", str(file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=patience_s)
        except subprocess.TimeoutExpired:
            raise InvalidRequest(
                f"{spec.environment.name!r} gave no first and last problem within {patience_s:g} s; ask for less, or "
                "submit with --no-check",
                field="environment",
            ) from None
    if done.returncode == _REFUSED and done.stdout.strip():
        answer = json.loads(done.stdout.splitlines()[-1])  # the environment may print lines before it
        raise InvalidRequest(answer["message"], field=answer["field"])
    if done.returncode not in (0, _NOT_INSTALLED):
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise EbbtideError(f"the environment {spec.environment.name!r} could not be tried: {last}")
