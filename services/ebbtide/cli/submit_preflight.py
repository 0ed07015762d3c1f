"""Checks a run before it is submitted: its spec, model, trainer and environment, in this order."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from ebbtide.cli.waiting import Waiting
from ebbtide.environments import DATASET
from ebbtide.environments.dataset import dataset_params
from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.hub_models import cached_model, is_hub_name, is_on_hub, no_directory
from ebbtide.types.run import RunSpec, to_mapping
from ebbtide.types.spec_file import SpecFile

_REFUSED: Final = 2
_NOT_INSTALLED: Final = 3
#: How the answer of an accepted run begins that a person should hear of.
_WARNING: Final = '{"warning": '


def check(path: Path, *, deep: bool = True) -> RunSpec:
    """Returns the spec in the TOML file at `path`. Raises `FileRefused` with line and column of all that is wrong.

    `deep` also has the trainer, in its own process, make the environment, read the model and compare lengths with its
    context. The paths of model and data become absolute then: services may run in another directory.
    """
    file = SpecFile(path)
    if deep and file.model and not _is_to_be_had(file.model):
        told = f"{no_directory(file.model)}. Where only other machines have it: --no-check"
        file.note(InvalidRequest(told, field="model"))
    file.refuse_noted()
    if not deep:
        return file.spec
    try:
        check_deeply(file.spec)
    except InvalidRequest as problem:
        file.note(problem)
        file.refuse_noted()
    return _with_absolute_paths(file.spec)


def _is_to_be_had(model: str) -> bool:
    """Whether it is a folder here, or one that trainer and driver find by its name on the Hub."""
    if not is_hub_name(model):
        return Path(model).is_dir()
    with Waiting(f"the Hugging Face Hub, for {model}"):
        return cached_model(model) is not None or is_on_hub(model)


def _with_absolute_paths(spec: RunSpec) -> RunSpec:
    if not is_hub_name(spec.model):
        spec = msgspec.structs.replace(spec, model=str(Path(spec.model).resolve()))
    if spec.environment.name != DATASET or not dataset_params(spec.environment.params).place.local:
        return spec
    data = str(Path(spec.environment.params["data"]).expanduser().resolve())
    environment = msgspec.structs.replace(spec.environment, params={**spec.environment.params, "data": data})
    return msgspec.structs.replace(spec, environment=environment)


def check_deeply(spec: RunSpec, patience_s: float = 120.0) -> None:
    """Prints a warning, if there is one. Raises `InvalidRequest` for a model, trainer or environment that an installed
    trainer refuses, and for an environment that takes longer than `patience_s` seconds."""
    with tempfile.TemporaryDirectory(prefix="ebbtide-") as folder:
        file = Path(folder) / "spec.json"
        file.write_text(json.dumps(to_mapping(spec)))
        command = [sys.executable, "-m", "ebbtide.trainer.trainer_preflight", str(file)]
        try:
            with Waiting(f"the check of the model and of the environment {spec.environment.name!r}"):
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
    if done.returncode == 0 and (said := done.stdout.strip().splitlines()) and said[-1].startswith(_WARNING):
        print(f"ebbtide: {json.loads(said[-1])['warning']}", file=sys.stderr)  # noqa: T201 - for people
