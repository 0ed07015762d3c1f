"""Runs `ebbtide demo`: a whole job on this machine, with a worker killed midway, and a report.

Invariant: the demo learns of the run only through the SDK, and acts on programs only through the launcher. All its
files lie in its run directory. Its programs die with it, and the next demo clears the directory.
"""

import asyncio
import shutil
import tomllib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from rich.console import Console

from ebbtide.cli.interrupts import run_demo_command
from ebbtide.cli.views.run import RunProgress, RunScreen, follow
from ebbtide.cli.views.tables import fact_table
from ebbtide.cli.views.timeline import Timeline, fetch, write
from ebbtide.client import Client
from ebbtide.client.client import read_spec
from ebbtide.demo.demo_report import DemoReport, KillRecord, make_report, summary
from ebbtide.demo.report_picture import terminal_curve, write_picture
from ebbtide.demo.token_accounts import TokenAccounts, read_attempts, settle
from ebbtide.demo.worker_kills import WorkerKills
from ebbtide.environments import needs_isolation
from ebbtide.errors import EbbtideError
from ebbtide.local_cluster.local_cluster import ClusterShape, LocalCluster, base_model, free_address, local_cluster
from ebbtide.types.run import Run, RunSpec, RunStatus, check_spec, to_mapping

#: As a spec's model: the one that `ebbtide base-model` makes.
BASE_MODEL = "base-model"
_RUN_ID = "demo"


class DemoOptions(Struct, frozen=True, kw_only=True):
    """Changes to `demo.toml`; None keeps its value."""

    run_dir: Path = Path("runs/demo")
    cache: Path = Path(".cache/base-models")
    spec: Path | None = None
    seed: int | None = None
    steps: int | None = None
    workers: Annotated[int, Meta(ge=1)] = 2
    gpus: str = ""  # a count or a list of those to use; empty: all
    temperature: float | None = None
    top_p: float | None = None
    eval_problems: int | None = None
    control: bool = False
    streaming: bool = False
    kill_worker: bool = True
    kill_coordinator: bool = False
    kill_trainer: bool = False


def demo_spec(options: DemoOptions) -> RunSpec:
    """Returns the run to submit. Raises `InvalidRequest` naming the field."""
    text = files("ebbtide.local_cluster").joinpath("demo.toml").read_text() if options.spec is None else None
    tree = tomllib.loads(text) if text is not None else to_mapping(read_spec(str(options.spec)))
    changes: dict[tuple[str, ...], Any] = {
        ("seed",): options.seed,
        ("trainer", "steps"): options.steps,
        ("trainer", "permute_rewards"): options.control or None,
        ("trainer", "streaming"): options.streaming or None,
        ("trainer", "minibatches"): 1 if options.streaming else None,  # a streamed step has one update
        ("sampling", "temperature"): options.temperature,
        ("sampling", "top_p"): options.top_p,
        ("evaluation", "problems"): options.eval_problems,
        ("output",): str(options.run_dir),
    }
    for path, value in changes.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        if value is not None:
            node[path[-1]] = value
    return check_spec(read_spec(tree))


def run(options: DemoOptions) -> int:
    """Returns exit status 0 if the run finished and its sums agree."""

    async def main() -> int:
        report, timeline, path = await run_demo(options)
        write_picture(report, path.with_suffix(".png"))
        drawn = write(timeline, path.parent)
        console = Console()
        print(f"\n{terminal_curve(report, min(100, console.width))}\n")  # noqa: T201 - rich would wrap it
        facts = [*summary(report, path), ("timeline", ", ".join(map(str, drawn)))]
        console.print(fact_table(facts), highlight=False)
        return 0 if report.rollouts_accounted_for else 1

    return run_demo_command(main, options.run_dir / "logs")


async def run_demo(options: DemoOptions) -> tuple[DemoReport, Timeline, Path]:
    """Runs the whole job. Returns the report, the timeline, and the report's file. Raises `EbbtideError`."""
    spec, screen = demo_spec(options), RunScreen("Ebbtide demo")
    async with shown_cluster(options.run_dir, _RUN_ID, screen, options.gpus) as cluster:
        demo = _Demo(options, spec, cluster, screen)
        run, progress, timeline = await cluster.launcher.during(demo.run())
    report, _ = report_of(cluster, screen, run, progress, kills=demo.kills.done)
    return report, timeline, write_report(options.run_dir, report)


@asynccontextmanager
async def shown_cluster(directory: Path, run_id: str, screen: RunScreen, gpus: str = "") -> AsyncIterator[LocalCluster]:
    """Gives a cluster in `directory`, cleared of the former run, and draws `screen` until the cluster has ended.

    `gpus`: those that it may use, as in `local_cluster`.
    """
    async with screen.shown():
        async with local_cluster(directory, screen.note, gpus=gpus) as cluster:
            shutil.rmtree(directory / run_id, ignore_errors=True)
            yield cluster
            screen.phase("shutdown")
        screen.phase("")


async def with_base_model(spec: RunSpec, cluster: LocalCluster, cache: Path, screen: RunScreen, phase: str) -> RunSpec:
    """Returns the spec with a base model made, if it asks for one. Raises `LaunchFailed`."""
    if spec.model != BASE_MODEL:
        return spec
    screen.phase(phase)
    path = await base_model(cluster, spec, cache, screen.detail)
    return msgspec.structs.replace(spec, model=str(path))


def check_finished(run: Run) -> None:
    """Raises `EbbtideError` for a run that failed or was cancelled."""
    if run.status is not RunStatus.FINISHED:
        raise EbbtideError(f"the run ended as {run.status.name.lower()}: {run.message}")


def report_of(
    cluster: LocalCluster, screen: RunScreen, run: Run, progress: RunProgress, kills: Sequence[KillRecord] = ()
) -> tuple[DemoReport, TokenAccounts]:
    """Reports an ended run from its events, the phases on the screen, and the ledgers of the cluster's workers."""
    accounts = settle(read_attempts(cluster.ledgers, run.run_id), {kill.program for kill in kills})
    tokens = cluster.shape.flush_tokens
    return make_report(progress, run, accounts, kills=kills, seconds=screen.phases, flush_tokens=tokens), accounts


def write_report(directory: Path, report: object) -> Path:
    path = directory / "report.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    return path


class _Demo:
    def __init__(self, options: DemoOptions, spec: RunSpec, cluster: LocalCluster, screen: RunScreen) -> None:
        self._options = options
        self._spec = spec
        self._cluster = cluster
        self._screen = screen
        self.kills = WorkerKills(cluster, screen.note)

    async def run(self) -> tuple[Run, RunProgress, Timeline]:
        """Runs the job to its end. Returns all that is known of it. Raises `EbbtideError` if the run failed."""
        options, screen = self._options, self._screen
        spec = await with_base_model(self._spec, self._cluster, options.cache, screen, "base model")
        screen.phase("boot")
        address, relay = free_address(), free_address()
        environment = spec.environment
        shape = ClusterShape(
            model=Path(spec.model),
            workers=options.workers,
            coordinator=address,
            relay=relay,
            environments=(environment.name,) if needs_isolation(environment.name, environment.params) else (),
        )
        await self._cluster.boot(shape)
        token = self._cluster.token_file.read_text()
        async with Client(address, relay, token=token) as client:
            screen.phase("run")
            run = await client.submit(spec, _RUN_ID)
            progress = RunProgress(run.run_id, run=run)
            screen.attach(progress)
            planned = {
                "worker": options.kill_worker,
                "coordinator": options.kill_coordinator,
                "trainer": options.kill_trainer,
            }
            killing = asyncio.create_task(self.kills.run(progress, **planned))
            try:
                run = await follow(client, progress)
            finally:
                killing.cancel()
                await asyncio.wait({killing})
            if not killing.cancelled():
                killing.result()  # raises what went wrong in it
            timeline = await fetch(client, run.run_id)
        check_finished(run)
        return run, progress, timeline
