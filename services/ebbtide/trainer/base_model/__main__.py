"""Runs `ebbtide base-model`: makes the base model for a run's environment, or finds the one made before."""

import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.settings import load
from ebbtide.trainer.base_model.base_model_plan import BaseModelPlan, base_model_path, is_made
from ebbtide.types.parse import parse
from ebbtide.types.run import EnvironmentSpec

if TYPE_CHECKING:
    from ebbtide.trainer.base_model.base_model import BaseModelProgress


class BaseModelSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    spec: Annotated[str, Meta(description="spec of a run (TOML or JSON), of which environment and seed are used")]
    directory: Annotated[str, Meta(description="folder of base models")] = ".cache/base-models"
    seed: Annotated[int, Meta(ge=-1, description="seed; -1 takes the spec's")] = -1
    error_rate: Annotated[
        float, Meta(ge=0, lt=1, description="fraction of mistyped letters and digits in demonstrations")
    ] = BaseModelPlan.error_rate
    target_accuracy: Annotated[float, Meta(gt=0, le=1, description="sampled accuracy at which training ends")] = (
        BaseModelPlan.target_accuracy
    )
    threads: Annotated[int, Meta(ge=0, description="CPU threads of torch; 0 leaves the choice to torch")] = 0
    json: Annotated[bool, Meta(description="print progress and path as lines of JSON")] = False


def main(argv: Sequence[str] | None = None) -> None:
    """Make a small model that half masters a run's environment, and print its path."""
    settings = load(BaseModelSettings, prog="ebbtide base-model", argv=argv, description=main.__doc__ or "")
    try:
        path = _make(settings)
    except EbbtideError as error:
        print(f"ebbtide base-model: {error}", file=sys.stderr)  # noqa: T201 - this is a command
        sys.exit(2)
    _say(json.dumps({"path": str(path.resolve())}) if settings.json else str(path))


def _make(settings: BaseModelSettings) -> Path:
    spec = _read(Path(settings.spec))
    environment = parse(EnvironmentSpec, spec.get("environment", {}))
    seed = settings.seed if settings.seed >= 0 else int(spec.get("seed", 0))

    from ebbtide.environments import load_source

    directory, plan = Path(settings.directory), _plan(settings)
    source = load_source(environment.name, environment.params, seed)
    if is_made(path := base_model_path(directory, source, seed, plan)):
        return path

    from ebbtide.trainer.learning.torch_threads import limit_threads

    limit_threads(settings.threads)  # before anything imports torch

    from ebbtide.trainer.base_model.base_model import make_base_model

    def tell(now: "BaseModelProgress") -> None:
        values = {"step": now.step, "loss": now.loss, "accuracy": now.accuracy, "seconds": now.seconds}
        if settings.json:
            _say(json.dumps(values))
        elif now.step % 20 == 0:
            _say(f"step {now.step}: loss {now.loss:.2f}, accuracy {now.accuracy:.2f}")

    return make_base_model(directory, source, seed=seed, plan=plan, progress=tell)


def _plan(settings: BaseModelSettings) -> BaseModelPlan:
    return BaseModelPlan(error_rate=settings.error_rate, target_accuracy=settings.target_accuracy)


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - this is a command


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text()
        spec: Mapping[str, Any] = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot be read ({error})", field=str(path)) from None
    return spec


if __name__ == "__main__":
    main()
