import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import typer
from msgspec.structs import replace

from ebbtide.cli.waiting import Waiting
from ebbtide.errors import InvalidRequest
from ebbtide.profiling.profile_fits import fit_engine, fit_trainer
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.engines.profile_files import write_profile
from ebbtide.simulator.engines.trainer_profile import TrainerProfile

_CPU_INFO: Final = Path("/proc/cpuinfo")
_MODEL_NAME: Final = "model name"


def profile_engine(model: Path, out: Path, *, minutes: float, device: str, options: Sequence[str]) -> None:
    """Ends this process. `options`: of the rollout-worker. Raises `InvalidRequest`, and `EngineFailed` if the engine
    fails."""
    from ebbtide.profiling.engine_measuring import measure_vllm
    from ebbtide.rollout_worker.settings import WorkerSettings
    from ebbtide.settings import read

    _check_out(out)
    settings = read(WorkerSettings, prog="ebbtide serve rollout-worker", argv=["--model", str(model), *options])
    with Waiting("the engine") as waiting:
        measured = measure_vllm(settings, seconds=60 * minutes, tell=_telling(waiting))
    profile = fit_engine(
        measured,
        name=out.stem,
        model=model.resolve().name,
        device=device or measured.device or _processor(),
        gpus=settings.vllm.tensor_parallel_size if measured.device else 0,
        source=_source(minutes, " ".join(options)),
    )
    _write(profile, out)
    # vLLM's objects live until the interpreter ends, and then complain that their modules are gone.
    sys.stdout.flush()
    os._exit(0)


def profile_trainer(
    spec_file: Path,
    out: Path,
    *,
    model: Path | None,
    minutes: float,
    prompt_tokens: int,
    threads: int,
    on: str,
    device: str,
) -> None:
    """Raises `InvalidRequest` naming the key of the spec, or the option."""
    from ebbtide.client.client import read_spec
    from ebbtide.profiling.trainer_measuring import measure_trainer

    _check_out(out)
    spec = read_spec(spec_file)
    spec = replace(spec, model=str(model)) if model else spec
    with Waiting("the trainer") as waiting:
        measured = measure_trainer(
            spec,
            device=on,
            threads=threads,
            prompt_tokens=prompt_tokens,
            seconds=60 * minutes,
            folder=out.resolve().parent,
            tell=_telling(waiting),
        )
    profile = fit_trainer(
        measured,
        name=out.stem,
        model=Path(spec.model).resolve().name,
        device=device or measured.device or _processor(),
        gpus=1 if measured.device else 0,
        source=_source(minutes, f"{spec_file.name}, {threads or 'all'} threads"),
    )
    _write(profile, out)


def _check_out(out: Path) -> None:
    """Before minutes are spent."""
    if out.suffix != ".toml":
        raise InvalidRequest("must end with .toml, as profiles are TOML files", field="--out")
    if not out.parent.is_dir():
        raise InvalidRequest(f"the folder {out.parent} does not exist; make it first", field="--out")


def _write(profile: EngineProfile | TrainerProfile, out: Path) -> None:
    write_profile(profile, out)
    if errors := profile.errors:
        _tell(
            f"{out}: fitted to {errors.observations} measurements; relative errors: "
            f"median {errors.median:.1%}, 90 % within {errors.p90:.1%}, worst {errors.worst:.1%}"
        )


def _source(minutes: float, how: str) -> str:
    return f"measured by `ebbtide profile` in {minutes:g} minutes ({how or 'default settings'})"


def _processor() -> str:
    """The name of this machine's processor."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(_MODEL_NAME)]
    return names[0] if names else platform.machine()


def _telling(waiting: Waiting) -> Callable[[str], None]:
    def tell(text: str) -> None:
        waiting.heard()
        _tell(text)

    return tell


def _tell(text: str) -> None:
    typer.echo(text)
