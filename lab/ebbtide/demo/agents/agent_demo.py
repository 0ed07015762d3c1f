"""Runs `ebbtide demo agent`: trains an agent of several turns through a gateway while a worker is killed, and reports.

Invariant: that of `ebbtide.demo.demo`. Agents know the gateway's URL, the trainer knows sessions and rewards; only
the demo knows both.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final

import aiohttp
import openai
from msgspec import Meta, Struct
from msgspec.structs import replace
from rich.console import Console
from tokenizers import Tokenizer

from ebbtide.cli.interrupts import run_demo_command
from ebbtide.cli.views.run import RunProgress, RunScreen, follow
from ebbtide.cli.views.tables import fact_table
from ebbtide.client import Client
from ebbtide.client.client import read_spec
from ebbtide.demo.agents.agent_player import AgentPlayer, PlayedSessions
from ebbtide.demo.agents.agent_report import AgentReport, agent_report, agent_summary, shown_lines
from ebbtide.demo.agents.session_api import SessionApi
from ebbtide.demo.agents.trace_text import Decode
from ebbtide.demo.demo import check_finished, report_of, shown_cluster, write_report
from ebbtide.demo.report_picture import terminal_curve, write_picture
from ebbtide.demo.worker_kills import KillMoment, WorkerKills
from ebbtide.local_cluster.local_cluster import ClusterShape, LocalCluster, base_model, free_address
from ebbtide.types.run import EnvironmentSpec, Run, RunSpec, check_spec, to_mapping

_RUN_ID: Final = "demo-agent"
#: What the base model learns from: single turns, with fewer errors than in `ebbtide demo`, as a session needs three
#: right ones in a row. It then finds a number in about one session of five.
_TURNS: Final = EnvironmentSpec(name="ebbtide.demo.agents.number_problem:NumberTurns")
_ERROR_RATE: Final = 0.05
#: One base model for all seeds: another seed shows other problems, and need not wait for another model.
_BASE_SEED: Final = 0
_TARGET_ACCURACY: Final = 0.6
#: The model writes calls as Python.
_TOOL_PARSER: Final = "pythonic"
#: Completions are short, so that they are stored in smaller parts than by default.
_FLUSH_TOKENS, _FLUSH_MS = 4, 50
#: A call of the tool has 18 tokens. The first of them are stored then, and its end is not near.
_KILL: Final = KillMoment(rollouts=4, tokens=range(9, 15), prefix="")


class AgentDemoOptions(Struct, frozen=True, kw_only=True):
    """Changes to `agent.toml`; None keeps its value."""

    run_dir: Path = Path("runs/demo-agent")
    cache: Path = Path(".cache/base-models")
    seed: int | None = None
    steps: int | None = None
    workers: Annotated[int, Meta(ge=1)] = 2
    gpus: str = ""  # a count or a list of those to use; empty: all
    control: bool = False
    kill_worker: bool = True


def agent_spec(options: AgentDemoOptions) -> RunSpec:
    """Returns the run to submit. Raises `InvalidRequest` naming the field."""
    tree: dict[str, Any] = to_mapping(read_spec(str(files("ebbtide.demo.agents").joinpath("agent.toml"))))
    tree["output"] = str(options.run_dir)
    trainer = {"steps": options.steps, "permute_rewards": options.control or None}
    tree["trainer"] |= {name: value for name, value in trainer.items() if value is not None}
    if options.seed is not None:
        tree["seed"] = options.seed
    return check_spec(read_spec(tree))


def run(options: AgentDemoOptions) -> int:
    """Returns exit status 0 if the run finished, and no trace differs from what its agent got."""

    async def main() -> int:
        report, trace, path = await run_agent_demo(options)
        write_picture(report.training, path.with_suffix(".png"))
        console = Console()
        print(f"\n{terminal_curve(report.training, min(100, console.width))}\n")  # noqa: T201 - rich would wrap it
        print("\n".join([*trace, ""]))  # noqa: T201
        console.print(fact_table(list(agent_summary(report, path))), highlight=False)
        return 1 if report.traces_different else 0

    return run_demo_command(main, options.run_dir / "logs")


async def run_agent_demo(options: AgentDemoOptions) -> tuple[AgentReport, Sequence[str], Path]:
    """Runs the whole job. Returns the report, a session's trace, and the report's file. Raises `EbbtideError`."""
    spec, screen = agent_spec(options), RunScreen("Ebbtide demo agent")
    async with shown_cluster(options.run_dir, _RUN_ID, screen, options.gpus) as cluster:
        demo = _AgentDemo(options, spec, cluster, screen)
        run, progress, played = await cluster.launcher.during(demo.run())
    training, _ = report_of(cluster, screen, run, progress, kills=demo.kills.done)
    report = agent_report(training, played)
    trace = list(shown_lines(played, _decoder(Path(run.spec.model))))
    return report, trace, write_report(options.run_dir, report)


class _AgentDemo:
    def __init__(self, options: AgentDemoOptions, spec: RunSpec, cluster: LocalCluster, screen: RunScreen) -> None:
        self._options, self._spec, self._cluster, self._screen = options, spec, cluster, screen
        self.kills = WorkerKills(cluster, screen.note, _KILL)

    async def run(self) -> tuple[Run, RunProgress, PlayedSessions]:
        """Runs the job to its end. Raises `EbbtideError` if the run failed, or agents did."""
        shape = await self._boot()
        token = self._cluster.token_file.read_text()
        async with Client(shape.coordinator, shape.relay, token=token) as client:
            self._screen.phase("run")
            run = await client.submit(self._spec, _RUN_ID)
            progress = RunProgress(run.run_id, run=run)
            self._screen.attach(progress)
            async with _player(f"http://{shape.gateway}", token, self._spec, progress) as player:
                run = await self._play(client, progress, player)
        check_finished(run)
        return run, progress, player.played

    async def _boot(self) -> ClusterShape:
        screen, turns = self._screen, replace(self._spec, environment=_TURNS, seed=_BASE_SEED)
        screen.phase("base model")
        model = await base_model(
            self._cluster,
            turns,
            self._options.cache,
            screen.detail,
            error_rate=_ERROR_RATE,
            target_accuracy=_TARGET_ACCURACY,
        )
        self._spec = replace(self._spec, model=str(model))
        screen.phase("boot")
        shape = ClusterShape(
            model=model,
            workers=self._options.workers,
            coordinator=free_address(),
            relay=free_address(),
            gateway=free_address(),
            tool_parser=_TOOL_PARSER,
            flush_tokens=_FLUSH_TOKENS,
            flush_interval_ms=_FLUSH_MS,
        )
        await self._cluster.boot(shape)
        return shape

    async def _play(self, client: Client, progress: RunProgress, player: AgentPlayer) -> Run:
        """Follows the run to its end, while agents play and a worker is killed."""
        kills = self.kills.run(progress, worker=self._options.kill_worker, coordinator=False, trainer=False)
        following = asyncio.create_task(follow(client, progress))
        playing, killing = asyncio.create_task(player.run()), asyncio.create_task(kills)
        try:
            await asyncio.wait({following, playing}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done() and not (await client.run(progress.run_id)).status.ended:
                playing.result()  # raises what agents failed by; those of an ended run fail by its end
            return await following
        finally:
            tasks = {following, playing, killing}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if not killing.cancelled():
                killing.result()  # raises what went wrong in it


@asynccontextmanager
async def _player(url: str, key: str, spec: RunSpec, progress: RunProgress) -> AsyncIterator[AgentPlayer]:
    headers, wait = {"authorization": f"Bearer {key}"}, aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(url, headers=headers, timeout=wait) as http,
        # An agent waits as long as it takes, and never asks twice: the gateway is to lose no request.
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=None) as client,
    ):
        api = SessionApi(http, progress.run_id)
        yield AgentPlayer(spec, progress, client, api, _decoder(Path(spec.model)))


def _decoder(model: Path) -> Decode:
    """Reads ids as the model's own tokenizer does, without special tokens."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    return decode
