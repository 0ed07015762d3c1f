"""Runs `ebbtide demo coserving`: serves a model under replayed traffic while a training run borrows its idle time.

Invariant: a process of its own sends the traffic through the guard, independently of the run. All files lie in the run
directory. The demo's programs die with it, and the next demo clears the directory.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
import psutil
from msgspec import Struct
from rich.console import Console

from ebbtide.cli.interrupts import run_demo_command
from ebbtide.cli.views.guard import GuardClient, guard_client, head, small_picture
from ebbtide.cli.views.run import RunProgress, RunScreen, follow
from ebbtide.cli.views.tables import fact_table
from ebbtide.client import Client
from ebbtide.demo.coserving.coserving_client import TrafficPlan
from ebbtide.demo.coserving.coserving_options import CoservingOptions, CoservingTraffic, traffic
from ebbtide.demo.coserving.coserving_picture import write_coserving_picture
from ebbtide.demo.coserving.coserving_records import (
    BudgetMoment,
    ReplayRecord,
    ServedAnswer,
    TimeStretch,
    percentile,
    tpots,
    ttfts,
)
from ebbtide.demo.coserving.coserving_report import CoservingReport, HarvestFigures, make_coserving, told
from ebbtide.demo.coserving.guarded_pausing import GuardedPausing, pausing
from ebbtide.demo.coserving.request_traffic import TrafficRequest, laps
from ebbtide.demo.demo import (
    DemoOptions,
    check_finished,
    demo_spec,
    report_of,
    shown_cluster,
    with_base_model,
    write_report,
)
from ebbtide.demo.demo_report import DemoReport, summary
from ebbtide.demo.foreign_load import CoreUse, cores, share_of_others
from ebbtide.demo.token_accounts import TokenAccounts
from ebbtide.errors import EbbtideError, Unavailable
from ebbtide.grants import Page, page_path, socket_path
from ebbtide.local_cluster.local_cluster import ClusterShape, LocalCluster, free_address
from ebbtide.local_cluster.serving_checkpoint import served_model
from ebbtide.serving_guard.governor.budget_decider import LatencyTargets
from ebbtide.types.grants import GuardStatus
from ebbtide.types.run import Run, RunSpec

_RUN_ID: Final = "coserving"
_SERVED: Final = "served"
#: The guard's own multiples of the percentiles of serving alone.
_TTFT_FACTOR, _TPOT_FACTOR = LatencyTargets().ttft_factor, LatencyTargets().tpot_factor
#: Prompt lengths of the requests that warm up a new engine; their latencies are not counted.
_WARM_UP: Final = (16, 64, 256, 1024, 2048, 512, 128, 1024)
_WARM_UP_APART_S: Final = 0.6
#: Times that one client replays the window beside the run.
_LAPS: Final = 40
_LOOK_S: Final = 0.25
#: The lease must outlast the bursts in which the trainer is stopped.
_LEASE_S: Final = 120.0
#: Lines of the run's summary that the verdict does not repeat.
_RUN_LINES = ("accuracy", "rollouts", "logprob gap", "seconds", "checkpoint")


class CoservingOutcome(Struct, frozen=True, kw_only=True):
    """Results of the demo; `report.json` holds all but the replay."""

    coserving: CoservingReport
    run: DemoReport
    replay: ReplayRecord


def run(options: CoservingOptions) -> int:
    """Returns exit status 0 if the run finished, its sums agree and no token was lost.

    A missed SLO is a result, not a failure.
    """

    async def main() -> int:
        outcome, path = await run_coserving(options)
        picture = path.with_name("timeline.png")
        write_coserving_picture(outcome.replay, picture)
        of_run = (fact for fact in summary(outcome.run, path) if fact[0] in _RUN_LINES)
        facts = [*told(outcome.coserving), *of_run, ("timeline", str(picture)), ("report", str(path))]
        Console().print(fact_table(facts), highlight=False)
        return 0 if outcome.run.rollouts_accounted_for and not outcome.coserving.tokens_lost else 1

    return run_demo_command(main, options.run_dir / "logs")


async def run_coserving(options: CoservingOptions) -> tuple[CoservingOutcome, Path]:
    """Runs the whole demo. Returns its results, and the report's file. Raises `EbbtideError`."""
    sent, spec, screen = traffic(options), _spec(options), RunScreen("Ebbtide beside a served model")
    async with shown_cluster(options.run_dir, _RUN_ID, screen, options.gpus) as cluster:
        demo = _Demo(options, spec, sent, cluster, screen)
        run, progress = await cluster.launcher.during(demo.run())
    outcome = demo.outcome(*report_of(cluster, screen, run, progress))
    return outcome, write_report(options.run_dir, {"coserving": outcome.coserving, "run": outcome.run})


def _spec(options: CoservingOptions) -> RunSpec:
    demo = DemoOptions(
        run_dir=options.run_dir, seed=options.seed, steps=options.steps, eval_problems=options.eval_problems
    )
    return demo_spec(demo)


class _Demo:
    def __init__(
        self, options: CoservingOptions, spec: RunSpec, sent: CoservingTraffic, cluster: LocalCluster, screen: RunScreen
    ) -> None:
        self._options, self._spec, self._sent = options, spec, sent
        self._cluster, self._screen = cluster, screen
        self._status = GuardStatus()
        self._answers: list[ServedAnswer] = []
        self._stretches: list[TimeStretch] = []
        self._moments: list[BudgetMoment] = []
        self._targets = (0.0, 0.0)
        self._users_end = asyncio.Event()
        self._trainer_cpu_s = self._steps_s = 0.0

    async def run(self) -> tuple[Run, RunProgress]:
        """Runs the demo to the end of its run. Raises `EbbtideError` if the run failed."""
        spec = await with_base_model(self._spec, self._cluster, self._options.cache, self._screen, "models")
        self._screen.phase("boot")
        address, relay = free_address(), free_address()
        upstream = await self._boot(Path(spec.model), address, relay)
        await self._alone(upstream)
        self._screen.phase("beside")
        ttft_s, tpot_s = self._targets
        url = await self._cluster.guard(upstream, model=_SERVED, ttft_ms=1e3 * ttft_s, tpot_ms=1e3 * tpot_s)
        if not self._cluster.workers:  # on a GPU
            await self._cluster.add_worker()
        async with Client(address, relay, token=self._cluster.token_file.read_text()) as client:
            run, progress = await self._beside(client, spec, url)
        check_finished(run)
        return run, progress

    def outcome(self, report: DemoReport, accounts: TokenAccounts) -> CoservingOutcome:
        replay = ReplayRecord(
            title="serving alone, then during a training run",
            answers=tuple(self._answers),
            moments=tuple(self._moments),
            stretches=tuple(self._stretches),
            ttft_s=self._targets[0],
            tpot_s=self._targets[1],
        )
        harvest = HarvestFigures(
            generated=accounts.generated, lost=accounts.twice, steps_s=self._steps_s, trainer_cpu_s=self._trainer_cpu_s
        )
        found = make_coserving(self._sent.what, replay, harvest, self._status)
        return CoservingOutcome(coserving=found, run=report, replay=replay)

    async def _boot(self, model: Path, address: str, relay: str) -> str:
        """Boots everything but the guard, and what boots only by its grants. Returns the serving engine's URL.

        Raises `LaunchFailed`.
        """
        served = await asyncio.to_thread(served_model, self._options.cache)
        shape = ClusterShape(
            model=model,
            workers=1,
            coordinator=address,
            relay=relay,
            served=served,
            served_name=_SERVED,
            borrowed=True,
            lease_ttl_s=_LEASE_S,
            slots=64,
        )
        await self._cluster.boot(shape)
        return self._cluster.serving_url

    async def _alone(self, upstream: str) -> None:
        """Replays the window with nothing beside it, and derives the targets from its latencies."""
        self._screen.phase("alone")
        self._screen.detail(f"{len(self._sent.requests)} requests in {self._sent.seconds:.0f} s: {self._sent.what}")
        first = [TrafficRequest(_WARM_UP_APART_S * at, prompt, 16) for at, prompt in enumerate(_WARM_UP)]
        await self._send("warm-up", upstream, first)
        begin = cores()
        answers = await self._send("alone", upstream, self._sent.requests)
        self._add("serving alone", answers, begin)
        ttft, tpot = ttfts(answers), tpots(answers)
        if not ttft:
            raise EbbtideError(f"no request was served: {answers[0].failed if answers else 'none was sent'}")
        self._targets = (_TTFT_FACTOR * percentile(ttft), _TPOT_FACTOR * percentile(tpot))

    async def _send(self, name: str, url: str, requests: Sequence[TrafficRequest]) -> list[ServedAnswer]:
        """Returns the answers to all requests, or to those sent until the client was asked to end."""
        folder = self._cluster.directory
        plan, out = folder / f"{name}-plan.json", folder / f"{name}.json"
        plan.write_bytes(msgspec.json.encode(TrafficPlan(requests=list(requests))))
        arguments = ("--url", url, "--model", _SERVED, "--plan", str(plan), "--out", str(out))
        await self._cluster.run_once(name, "ebbtide.demo.coserving.coserving_client", *arguments, watch=lambda: None)
        return msgspec.json.decode(out.read_bytes(), type=list[ServedAnswer])

    def _add(self, name: str, answers: Sequence[ServedAnswer], begin: CoreUse) -> None:
        end = cores()
        self._answers += answers
        self._stretches.append(TimeStretch(name, begin.at_s, end.at_s, share_of_others(begin, end)))

    async def _beside(self, client: Client, spec: RunSpec, url: str) -> tuple[Run, RunProgress]:
        run = await client.submit(spec, _RUN_ID)
        progress = RunProgress(run.run_id, run=run)
        self._screen.attach(progress)
        begin = cores()
        async with self._paced() as paused, self._watched(paused):
            window = laps(self._sent.requests, self._sent.seconds, _LAPS)
            users = asyncio.create_task(again_until(self._users_end, lambda: self._send("beside", url, window)))
            following = asyncio.create_task(follow(client, progress))
            try:
                await asyncio.wait({following, users}, return_when=asyncio.FIRST_COMPLETED)
                if users.done():
                    users.result()  # raises what went wrong in them
                run = await following
                self._end_users()
                self._add("during a training run", await users, begin)
            finally:
                users.cancel()
                following.cancel()
                await asyncio.wait({users, following})
        return run, progress

    def _end_users(self) -> None:
        self._users_end.set()
        with suppress(ProcessLookupError, KeyError):
            os.kill(self._cluster.launcher.process("beside").pid, signal.SIGTERM)

    @asynccontextmanager
    async def _watched(self, paused: GuardedPausing) -> AsyncIterator[None]:
        """Reads and shows the guard's state while the block runs."""
        async with guard_client(socket_path(self._cluster.grants)) as guard:
            task = asyncio.create_task(self._watch(guard, paused))
            self._screen.beside = lambda: small_picture(self._status)
            try:
                yield
            finally:
                task.cancel()
                await asyncio.wait({task})
                self._screen.beside = None

    async def _watch(self, guard: GuardClient, paused: GuardedPausing) -> None:
        while True:
            with suppress(Unavailable):
                self._status = await guard.status()
                paused.generated = sum(one.tokens_harvested for one in self._status.borrowers)
                self._screen.detail(head(self._status))
            await asyncio.sleep(_LOOK_S)

    @asynccontextmanager
    async def _paced(self) -> AsyncIterator[GuardedPausing]:
        """Lets the trainer run, while the block does, only when nothing is inside the serving engine."""
        launcher, (worker,) = self._cluster.launcher, self._cluster.workers
        page = Page(page_path(self._cluster.grants, worker))
        cpu_s, busy_s = _cpu_s(launcher.process("trainer").pid), page.steps().busy_s

        def pid() -> int | None:
            trainer = launcher.process("trainer")
            return trainer.pid if trainer.returncode is None else None

        with pausing(page, pid) as paused:
            yield paused
        self._moments = paused.moments
        self._trainer_cpu_s = _cpu_s(launcher.process("trainer").pid) - cpu_s
        self._steps_s = page.steps().busy_s - busy_s


async def again_until(over: asyncio.Event, send: Callable[[], Awaitable[list[ServedAnswer]]]) -> list[ServedAnswer]:
    """Sends again and again until `over` is set, as time without traffic would count as idle. Returns all answers."""
    answers: list[ServedAnswer] = []
    while not over.is_set():
        answers += await send()
    return answers


def _cpu_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system
