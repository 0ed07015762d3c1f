"""`ebbtide demo`: a whole job on this machine, in the middle of which a worker is killed, and the report of it.

Invariant: what the demo knows of the run it knows through the SDK; what it does to programs it does through the
launcher. All that it leaves lies in its run directory. If it dies here, so do its programs, and the next demo clears
the directory.
"""

import asyncio
import shutil
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ebbtide.cli.views.run_progress import RunProgress, follow
from ebbtide.cli.views.run_screen import RunScreen
from ebbtide.cli.views.timeline import Timeline
from ebbtide.cli.views.timeline_files import fetch
from ebbtide.client import Client
from ebbtide.client.client import read_spec
from ebbtide.demo.demo_report import DemoReport, make_report
from ebbtide.demo.token_accounts import read_attempts, settle
from ebbtide.demo.worker_kills import WorkerKills
from ebbtide.errors import EbbtideError
from ebbtide.local_cluster.cluster_base_model import base_model
from ebbtide.local_cluster.local_cluster import ClusterShape, LocalCluster, free_address, local_cluster
from ebbtide.types.run import Run, RunSpec, RunStatus, check_spec, to_mapping

#: In a spec, stands for the model that `ebbtide base-model` makes.
BASE_MODEL = "base-model"
_RUN_ID = "demo"


class DemoOptions(Struct, frozen=True, kw_only=True):
    """What may differ from `demo.toml`; None: as it says there."""

    run_dir: Path = Path("runs/demo")
    cache: Path = Path(".cache/base-models")
    spec: Path | None = None
    seed: int | None = None
    steps: int | None = None
    workers: Annotated[int, Meta(ge=1)] = 2
    temperature: float | None = None
    top_p: float | None = None
    eval_problems: int | None = None
    control: bool = False
    kill_worker: bool = True
    kill_coordinator: bool = False
    kill_trainer: bool = False


def demo_spec(options: DemoOptions) -> RunSpec:
    """The run to submit. Raises `InvalidRequest` naming the field."""
    text = files("ebbtide.demo").joinpath("demo.toml").read_text() if options.spec is None else None
    tree = tomllib.loads(text) if text is not None else to_mapping(read_spec(str(options.spec)))
    changes: dict[tuple[str, ...], Any] = {
        ("seed",): options.seed,
        ("trainer", "steps"): options.steps,
        ("trainer", "permute_rewards"): options.control or None,
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


async def run_demo(options: DemoOptions) -> tuple[DemoReport, Timeline, Path]:
    """The whole job. Returns the report, who generated what when, and the report's file. Raises `EbbtideError` where
    there is none."""
    spec, screen = demo_spec(options), RunScreen("Ebbtide demo")
    async with screen.shown():
        async with local_cluster(options.run_dir, screen.note) as cluster:
            shutil.rmtree(options.run_dir / _RUN_ID, ignore_errors=True)
            demo = _Demo(options, spec, cluster, screen)
            run, progress, timeline = await cluster.launcher.during(demo.run())
            screen.phase("shutdown")
        screen.phase("")
    kills = demo.kills.done
    accounts = settle(read_attempts(cluster.ledgers, run.run_id), {kill.program for kill in kills})
    report = make_report(
        progress, run, accounts, kills=kills, seconds=screen.phases, flush_tokens=cluster.shape.flush_tokens
    )
    path = options.run_dir / "report.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    return report, timeline, path


class _Demo:
    def __init__(self, options: DemoOptions, spec: RunSpec, cluster: LocalCluster, screen: RunScreen) -> None:
        self._options = options
        self._spec = spec
        self._cluster = cluster
        self._screen = screen
        self.kills = WorkerKills(cluster, screen.note)

    async def run(self) -> tuple[Run, RunProgress, Timeline]:
        """Up to the end of the run, and what is known of it then. Raises `EbbtideError` if the run failed."""
        spec = await self._with_model()
        self._screen.phase("boot")
        address, relay = free_address(), free_address()
        model = Path(spec.model)
        await self._cluster.boot(
            ClusterShape(model=model, workers=self._options.workers, coordinator=address, relay=relay)
        )
        token = self._cluster.token_file.read_text()
        async with Client(address, relay, token=token) as client:
            self._screen.phase("run")
            run = await client.submit(spec, _RUN_ID)
            progress = RunProgress(run.run_id, run=run)
            self._screen.attach(progress)
            killing = asyncio.create_task(self.kills.run(progress, **self._plan()))
            try:
                run = await follow(client, progress)
            finally:
                killing.cancel()
                await asyncio.wait({killing})
            if not killing.cancelled():
                killing.result()  # what kept it from its work, if anything did
            timeline = await fetch(client, run.run_id)
        if run.status is not RunStatus.FINISHED:
            raise EbbtideError(f"the run ended as {run.status.name.lower()}: {run.message}")
        return run, progress, timeline

    async def _with_model(self) -> RunSpec:
        if self._spec.model != BASE_MODEL:
            return self._spec
        self._screen.phase("base model")
        path = await base_model(self._cluster, self._spec, self._options.cache, self._screen.detail)
        return msgspec.structs.replace(self._spec, model=str(path))

    def _plan(self) -> dict[str, bool]:
        options = self._options
        return {
            "worker": options.kill_worker,
            "coordinator": options.kill_coordinator,
            "trainer": options.kill_trainer,
        }
