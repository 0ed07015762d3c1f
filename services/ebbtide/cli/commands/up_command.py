"""Runs `ebbtide up`: a local cluster that stays until it is interrupted."""

import asyncio
import shlex
import sys
from pathlib import Path

import msgspec
from rich.console import Console

from ebbtide.cli.interrupts import INTERRUPTED
from ebbtide.cli.interrupts import run as run_interruptible
from ebbtide.demo.demo import DemoOptions, demo_spec
from ebbtide.local_cluster.local_cluster import ClusterShape, LocalCluster, base_model, free_address, local_cluster

_ENVIRONMENT = "env"


def run(shape: ClusterShape, directory: Path, cache: Path) -> int:
    """Returns exit status 0 after an interrupt, once all programs are gone."""
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


async def _boot(cluster: LocalCluster, shape: ClusterShape, cache: Path, console: Console) -> None:
    with console.status("booting") as status:
        if shape.model == Path():
            spec = demo_spec(DemoOptions())
            found = await base_model(cluster, spec, cache, lambda text: status.update(f"base model: {text}"))
            shape = msgspec.structs.replace(shape, model=found)
            status.update("booting")
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
