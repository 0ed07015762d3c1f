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
from ebbtide.local_cluster.local_cluster import (
    ClusterShape,
    LocalCluster,
    base_model,
    demo_run,
    free_address,
    local_cluster,
)
from ebbtide.rollout_worker.engine.checkpoint_facts import check_directory
from ebbtide.rollout_worker.settings import WorkerSettings
from ebbtide.settings import read

_ENVIRONMENT = "env"


def run(shape: ClusterShape, directory: Path, cache: Path) -> int:
    """Returns exit status 0 after an interrupt, once all programs are gone."""
    if shape.model != Path():
        _check_model(shape)
    console = Console(highlight=False)
    addresses = {"coordinator": free_address(shape.coordinator), "relay": free_address(shape.relay)}
    further = {"standby": shape.standby, "gateway": shape.gateway}
    addresses |= {name: free_address(wanted) for name, wanted in further.items() if wanted}
    shape = msgspec.structs.replace(shape, **addresses)

    async def main() -> int:
        async with local_cluster(directory, console.print) as cluster:
            await _boot(cluster, shape, cache, console)
            await cluster.launcher.during(asyncio.Event().wait())
        return 0

    status = run_interruptible(main)
    if status == INTERRUPTED:
        print(f"All processes are gone. Logs: {directory / 'logs'}", file=sys.stderr)  # noqa: T201 - a command
        return 0
    return status


def _check_model(shape: ClusterShape) -> None:
    """Raises `InvalidRequest` for what the workers would refuse: their settings, and the model."""
    config = ["--config", str(shape.worker_config)] if shape.worker_config else []
    argv = ["--model", str(shape.model), *config]
    worker = read(WorkerSettings, prog="ebbtide rollout-worker", argv=argv, environ={})
    if worker.engine != "vllm":
        return
    try:
        check_directory(worker.model)
    except InvalidRequest as error:
        raise InvalidRequest(str(error).removeprefix("model: "), field="--model") from None


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
    talk = "    ebbtide chat RUN\n" if shape.gateway else ""
    console.print(f"    source {file}\n    ebbtide submit RUN.toml --watch\n{talk}")
    console.print(f"Logs are in {cluster.directory / 'logs'}. Ctrl-C ends it.")
