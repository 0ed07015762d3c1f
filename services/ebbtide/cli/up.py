"""Runs `ebbtide up`: a local cluster that stays until it is interrupted."""

import asyncio
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path

import msgspec
from rich.console import Console

from ebbtide.cli.interrupts import INTERRUPTED
from ebbtide.cli.interrupts import run as run_interruptible
from ebbtide.cli.waiting import Waiting
from ebbtide.errors import InvalidRequest
from ebbtide.hub_models import is_hub_name, model_folder
from ebbtide.local_cluster.host_resources import engine_need, torch_on_gpus, vllm_on_gpus
from ebbtide.local_cluster.local_cluster import (
    ClusterShape,
    LocalCluster,
    base_model,
    demo_run,
    free_address,
    local_cluster,
    placement_of,
    usable_devices,
)
from ebbtide.rollout_worker.engine.checkpoint_facts import check_directory
from ebbtide.rollout_worker.settings import WorkerSettings
from ebbtide.settings import read
from ebbtide.trainer.settings import TrainerSettings

_ENVIRONMENT = "env"


def run(shape: ClusterShape, directory: Path, cache: Path, *, workers: int | None = None, gpus: str = "") -> int:
    """Returns exit status 0 after an interrupt, once all programs are gone.

    `workers`: None: as many as there are GPUs for. `gpus`: those to use, as in `local_cluster`.
    """
    shape = msgspec.structs.replace(shape, model=_folder_of(shape.model))
    for config in shape.worker_configs or (None,):
        _check_worker(shape.model, config)
    if shape.trainer_config:
        argv = ["--config", str(shape.trainer_config)]
        trainer = read(TrainerSettings, prog="ebbtide serve trainer", argv=argv, environ={})
        if trainer.ranks not in (1, shape.ranks):
            text = f"ranks is {trainer.ranks}, and --ranks {shape.ranks}: leave it out of the file, and give --ranks"
            raise InvalidRequest(text, field="--trainer-config")
    shape = msgspec.structs.replace(shape, workers=workers_for(shape, gpus) if workers is None else workers)
    if len(shape.worker_configs) > (count := shape.workers + shape.generate):
        text = f"{len(shape.worker_configs)} files are for as many workers, and there are {count}; name fewer"
        raise InvalidRequest(text, field="--worker-config")
    placement_of(shape, usable_devices(gpus))  # says what does not fit before a model is made
    console = Console(highlight=False)
    addresses = {"coordinator": free_address(shape.coordinator), "relay": free_address(shape.relay)}
    further = {"standby": shape.standby, "gateway": shape.gateway}
    addresses |= {name: free_address(wanted) for name, wanted in further.items() if wanted}
    shape = msgspec.structs.replace(shape, **addresses)

    async def main() -> int:
        async with local_cluster(directory, console.print, gpus=gpus) as cluster:
            await _boot(cluster, shape, cache, console)
            await cluster.launcher.during(asyncio.Event().wait())
        return 0

    status = run_interruptible(main)
    if status == INTERRUPTED:
        print(f"All processes are gone. Logs: {directory / 'logs'}", file=sys.stderr)  # noqa: T201 - a command
        return 0
    return status


def workers_for(shape: ClusterShape, gpus: str) -> int:
    """The number of workers that nobody stated: one for each GPU, or set of them, that the trainer leaves."""
    devices = usable_devices(gpus)
    each = engine_need("", shape.model, shape.config(0))
    if not devices or (each.is_vllm and not vllm_on_gpus()):
        return shape.workers
    ranks = shape.ranks if torch_on_gpus() else 0
    least = 0 if shape.generate else 1
    return max(least, (len(devices) - ranks) // each.devices)


def _folder_of(model: Path) -> Path:
    """Fetches a model of the Hub. Raises `InvalidRequest`."""
    if not is_hub_name(str(model)):
        return model
    try:
        with Waiting(f"{model} from the Hugging Face Hub"):
            return model_folder(str(model))
    except InvalidRequest as error:
        raise InvalidRequest(error.text, field="--model") from None


def _check_worker(model: Path, config: Path | None) -> None:
    """Raises `InvalidRequest` for what a worker would refuse: its settings, and the model unless it is still made."""
    argv = ["--model", str(model), *(["--config", str(config)] if config else [])]
    worker = read(WorkerSettings, prog="ebbtide serve rollout-worker", argv=argv, environ={})
    if worker.engine != "vllm" or model == Path():
        return
    try:
        check_directory(worker.model)
    except InvalidRequest as error:
        raise InvalidRequest(error.text, field="--model") from None


async def _boot(cluster: LocalCluster, shape: ClusterShape, cache: Path, console: Console) -> None:
    told = "the base model"

    def tell(text: str) -> None:
        nonlocal told
        told = f"the base model, {text}"
        status.update(told)

    def waited_for() -> str:
        return told or f"{', '.join(cluster.launcher.booting)} to be ready"

    silent = nullcontext() if console.is_terminal else Waiting(waited_for)
    with console.status("booting") as status, silent:
        if shape.model == Path():
            found = await base_model(cluster, demo_run(), cache, tell)
            shape = msgspec.structs.replace(shape, model=found)
            status.update("booting")
        told = ""
        await cluster.boot(shape)
    exports = {
        "EBBTIDE_COORDINATOR": shape.coordinators,
        "EBBTIDE_RELAY": shape.relay,
        "EBBTIDE_TOKEN_FILE": str(cluster.token_file.resolve()),
        "EBBTIDE_ENVIRONMENTS_ALLOWED": shlex.quote(shape.allowed_environments),  # for the check at submit
    }
    if shape.gateway:
        exports["EBBTIDE_GATEWAY"] = f"http://{shape.gateway}"
    file = cluster.directory / _ENVIRONMENT
    file.write_text("".join(f"export {name}={value}\n" for name, value in exports.items()))
    console.print(f"The cluster is up: {shape.workers} workers on {shape.model}. In another terminal:\n")
    talk = "    ebbtide run chat RUN\n" if shape.gateway else ""
    console.print(f"    source {file}\n    ebbtide run submit RUN.toml --watch\n{talk}")
    console.print(f"Logs are in {cluster.directory / 'logs'}. Ctrl-C ends it.")
