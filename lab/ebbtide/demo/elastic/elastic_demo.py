"""Runs `ebbtide demo elastic`: one run on an elastic pool, then the same run on a fixed pool of the same machines.

In the elastic pool the trainer lends its device between its steps, and spot machines come and go by a trace. In the
fixed pool the trainer's device only trains. A machine is a core, and a GPU where there are GPUs: trainer and engine of
one device share the first one, and each other worker has one of its own. What belongs to no machine may run on any
core, in both pools alike.

Invariant: that of `ebbtide.demo.demo`, for each of the two clusters. One is gone before the other is started.
"""

import asyncio
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace
from rich.console import Console

from ebbtide.cli.interrupts import run_demo_command
from ebbtide.cli.views.run import RunProgress, RunScreen, follow
from ebbtide.cli.views.tables import fact_table
from ebbtide.cli.views.timeline import Timeline, fetch, write
from ebbtide.client import Client
from ebbtide.demo.demo import (
    DemoOptions,
    check_finished,
    demo_spec,
    report_of,
    shown_cluster,
    with_base_model,
    write_report,
)
from ebbtide.demo.demo_report import KillRecord
from ebbtide.demo.elastic.elastic_options import ElasticOptions, MachinePlan, plan_machines
from ebbtide.demo.elastic.elastic_picture import owner_strips, write_elastic_picture
from ebbtide.demo.elastic.elastic_report import (
    ELASTIC,
    FIXED,
    ElasticReport,
    MachinePrices,
    PoolRun,
    elastic_report,
    elastic_summary,
    step_tokens,
)
from ebbtide.demo.elastic.spot_machines import SpotMachines
from ebbtide.demo.foreign_load import cores, share_of_others
from ebbtide.environments import needs_isolation
from ebbtide.local_cluster.host_resources import vllm_on_gpus
from ebbtide.local_cluster.launcher import LaunchFailed
from ebbtide.local_cluster.local_cluster import ClusterShape, LocalCluster, free_address, usable_devices
from ebbtide.types.device_turns import LENT
from ebbtide.types.run import Run, RunSpec

_WIDEST: Final = 120


def run(options: ElasticOptions) -> int:
    """Returns exit status 0 if both runs finished, their sums agree, and the elastic one's device generated.

    A pool that is slower or dearer than the other is a result, not a failure.
    """

    async def main() -> int:
        report, path = await run_elastic(options)
        write_elastic_picture(report, path.with_suffix(".png"))
        console = Console()
        strips = "\n".join(owner_strips(report.runs, min(_WIDEST, console.width)))
        print(f"\n{strips}\n")  # noqa: T201 - rich would wrap it
        console.print(fact_table(list(elastic_summary(report, path))), highlight=False)
        good = all(one.report.rollouts_accounted_for for one in report.runs)
        return 0 if good and report.elastic.device[LENT] > 0 else 1

    return run_demo_command(main, options.run_dir)


async def run_elastic(options: ElasticOptions) -> tuple[ElasticReport, Path]:
    """Runs both pools. Returns the report, and its file. Raises `EbbtideError`."""
    gpus = len(usable_devices(options.gpus)) if vllm_on_gpus() else 0
    plan, spec = plan_machines(options, gpus=gpus), elastic_spec(options)
    elastic, spec = await _run_pool(ELASTIC, options, plan, spec)
    fixed, _ = await _run_pool(FIXED, options, plan, spec)
    prices = MachinePrices(reserved=options.reserved_price, spot=options.spot_price)
    report = elastic_report(elastic, fixed, prices, machines=plan.what, notice_s=options.notice_s)
    return report, write_report(options.run_dir, report)


def elastic_spec(options: ElasticOptions) -> RunSpec:
    """Returns the run of both pools: that of `ebbtide demo`, streamed. Raises `InvalidRequest` naming the field."""
    changed = {name: getattr(options, name) for name in ("spec", "seed", "steps", "eval_problems")}
    return demo_spec(DemoOptions(streaming=True, **changed))


async def _run_pool(name: str, options: ElasticOptions, plan: MachinePlan, spec: RunSpec) -> tuple[PoolRun, RunSpec]:
    """Runs the whole job on one pool. Returns what became of it, and the spec with its base model."""
    directory = options.run_dir / name
    screen = RunScreen(f"Ebbtide demo elastic, {'1' if name == ELASTIC else '2'} of 2: the {name} pool")
    async with shown_cluster(directory, name, screen, options.gpus) as cluster:
        pool = _Pool(name, options, plan, replace(spec, output=str(directory)), cluster, screen)
        run, progress, timeline = await cluster.launcher.during(pool.run())
    report, _ = report_of(cluster, screen, run, progress, kills=pool.losses(progress))
    write(timeline, directory)
    pool_run = PoolRun(
        name=name,
        report=report,
        step_at_s=progress.step_at_s,
        step_tokens=step_tokens(progress.steps),
        turns=timeline.turns,
        stays=pool.machines.stays,
        reserved=pool.reserved,
        others=pool.others,
    )
    return pool_run, replace(spec, model=run.spec.model)


class _Pool:
    def __init__(
        self,
        name: str,
        options: ElasticOptions,
        plan: MachinePlan,
        spec: RunSpec,
        cluster: LocalCluster,
        screen: RunScreen,
    ) -> None:
        self._name, self._options, self._plan = name, options, plan
        self._spec, self._cluster, self._screen = spec, cluster, screen
        self._spot = name == ELASTIC or options.fixed == "spot"
        self.reserved = 1 if self._spot else 1 + len(plan.cores)
        self.machines = SpotMachines(cluster, plan, notice_s=options.notice_s, notify=screen.note)
        self.others = 0.0

    async def run(self) -> tuple[Run, RunProgress, Timeline]:
        """Runs the job to its end. Raises `EbbtideError` if the run failed."""
        screen = self._screen
        spec = await with_base_model(self._spec, self._cluster, self._options.cache, screen, "base model")
        screen.phase("boot")
        shape = self._shape(spec)
        await self._cluster.boot(shape)
        async with Client(shape.coordinator, shape.relay, token=self._cluster.token_file.read_text()) as client:
            screen.phase("run")
            begin = cores()
            run = await client.submit(spec, self._name)
            progress = RunProgress(run.run_id, run=run)
            screen.attach(progress)
            run = await self._beside_machines(client, progress)
            self.others = share_of_others(begin, cores())
            timeline = await fetch(client, run.run_id)
        check_finished(run)
        return run, progress, timeline

    def losses(self, progress: RunProgress) -> list[KillRecord]:
        """The workers that were lost with their machines."""
        return [
            KillRecord(program=stay.worker, at_s=stay.end_s, step=_step_at(progress, stay.end_s))
            for stay in self.machines.stays
            if stay.end_s is not None
        ]

    def _shape(self, spec: RunSpec) -> ClusterShape:
        environment = spec.environment
        return ClusterShape(
            model=Path(spec.model),
            environments=(environment.name,) if needs_isolation(environment.name, environment.params) else (),
            workers=self._plan.at_begin if self._spot else len(self._plan.cores),
            coordinator=free_address(),
            relay=free_address(),
            device_cores=(self._plan.device_core,),
            machines=self._plan.cores,
            generate=self._name == ELASTIC,
        )

    async def _beside_machines(self, client: Client, progress: RunProgress) -> Run:
        """Follows the run to its end, while spot machines come and go."""
        booted = self._cluster.workers[: self._plan.at_begin]
        playing = asyncio.create_task(self.machines.run(booted)) if self._spot else None
        following = asyncio.create_task(follow(client, progress))
        tasks: set[asyncio.Task[Any]] = {following, *([playing] if playing else [])}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if playing is not None and playing.done():
                _raise_of(playing)
            return await following
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


def _raise_of(playing: "asyncio.Task[None]") -> None:
    """Raises what ended the machines, which come and go without an end."""
    try:
        playing.result()
    except* LaunchFailed as failures:
        raise failures.exceptions[0] from None


def _step_at(progress: RunProgress, at_s: float) -> int:
    return max((step for step, step_at_s in progress.step_at_s.items() if step_at_s <= at_s), default=0)
