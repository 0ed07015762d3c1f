"""Shows a run: a table of what became of it, and a live screen (plain lines where the output is no terminal).

Invariant: only `follow` writes a `RunProgress`, from the run's first event on, in order; so two of one run agree in all
but samples. It is lost with the process, and the next `follow` builds it again. A screen only reads it.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from msgspec import Struct
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ebbtide.cli.cluster_connection import coordinator_of
from ebbtide.cli.views.fleet import worker_table
from ebbtide.cli.views.tables import GONE, cell, clock, fact_table, plain, plain_table
from ebbtide.cli.waiting import Waiting
from ebbtide.types.fleet import Worker
from ebbtide.types.run import Run, RunEvent, RunMoves, RunOutlook, RunSpec, RunStatus

if TYPE_CHECKING:
    from ebbtide.client import Client


class Histogram(Struct, frozen=True):
    """Counts observations by bucket."""

    buckets: tuple[tuple[float, int], ...]  # (upper bound, observations); bounds ascend, the last may be infinite

    @property
    def count(self) -> int:
        return sum(count for _, count in self.buckets)

    def at_most(self, share: float) -> float | None:
        """The bound of the bucket that this share of the observations does not exceed; None without observations."""
        wanted, seen = share * self.count, 0
        for bound, count in self.buckets:
            seen += count
            if count and seen >= wanted:
                return bound
        return None


def histogram(counters: Mapping[str, int], name: str) -> Histogram:
    """Reads the counters `NAME:le:BOUND`; each counts what lies between the previous bound and its own."""
    prefix = f"{name}:le:"
    found = {float(key.removeprefix(prefix)): count for key, count in counters.items() if key.startswith(prefix)}
    return Histogram(tuple(sorted(found.items())))


def finite(bound: float | None) -> float | None:
    """The bound unless it is infinite, which JSON cannot express."""
    return bound if bound is not None and math.isfinite(bound) else None


def detail_table(run: Run) -> Table:
    """Tabulates all that is known of the run."""
    return fact_table(_lines(run))


def _lines(run: Run) -> Iterator[tuple[str, str]]:
    counts = run.counters
    yield "run", f"{run.run_id}, {run.status.name.lower()} after {clock(run.age_s)}"
    if run.message:
        yield "", run.message
    if run.newest is not None:
        yield "policy", f"version {run.newest.version}, step {run.newest.step} of {run.spec.trainer.steps}"
    yield "share", _share(run)
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(run.dropped.items()) if count) or "none"
    count = {name: counts.get(name, 0) for name in ("submitted", "trained", "queued", "running", "finished")}
    yield "rollouts", f"{count['submitted']:,} submitted, {count['trained']:,} trained; dropped: {dropped}"
    yield "now", f"{count['queued']:,} wait, {count['running']:,} run, {count['finished']:,} finished"
    yield from _expected(run.outlook)
    yield from _served(counts)
    yield from _cut_scorings(counts)
    yield from _migration(counts, run.moves)
    yield from sorted(run.holders.items())


def _share(run: Run) -> str:
    share, spec = run.share, run.spec.share
    bounds = f"weight {spec.weight:g}, priority {spec.priority}, floor {spec.floor:.0%}"
    bounds += "" if spec.ceiling is None else f", ceiling {spec.ceiling:.0%}"
    if share is None:
        return bounds
    return f"{share.lately:.1%} of the tokens lately, {share.due:.1%} due, {share.workers:,} workers ({bounds})"


def _expected(outlook: RunOutlook | None) -> Iterator[tuple[str, str]]:
    """When its open rollouts end, as far as that is known."""
    if outlook is None:
        return
    if outlook.half_s:
        half, ninth = clock(outlook.half_s), clock(outlook.ninth_s)
        tail = f"none waits for a worker in the last {outlook.tail:.0%} of {half}"
        yield "open rollouts", f"the last ends within {half} (50 % probability) or {ninth} (90 %); {tail}"
    for one in outlook.longest:
        rest = f"{one.expected_tokens:,} more expected, at most {one.longest_tokens:,} four times in five"
        yield "may end last", f"{one.rollout_id}: {one.stored:,} tokens, {rest}"
    if outlook.forecast:
        held = f"{outlook.covered / outlook.forecast:.1%} of {outlook.forecast:,} responses"
        shared = f"groups share {outlook.intraclass_correlation:.0%} of the variance"
        yield "forecasts", f"{held} ended within their interval for 80 %; {shared}"


def _served(counts: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """What its gateways' clients asked for, if they did."""
    names = ("requests_submitted", "requests_completed", "sessions_opened", "sessions_completed", "sessions_dropped")
    asked, ended, opened, trajectories, dropped = (counts.get(name, 0) for name in names)
    if asked:
        yield "requests", f"{asked:,} submitted, {ended:,} ended"
    if opened:
        yield "sessions", f"{opened:,} opened, {trajectories:,} became trajectories, {dropped:,} dropped"


def _cut_scorings(counts: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """What the limit of scorings cut, if anything."""
    if cut := counts.get("rewards_out_of_time", 0):
        yield "rewards", f"{cut:,} reward computations cut by tail.reward_timeout_s"


def _migration(counts: Mapping[str, int], moves: RunMoves | None) -> Iterator[tuple[str, str]]:
    yield "attempts", f"{counts.get('attempts', 0):,}{_attempts_per_rollout(counts)}"
    moved, midway = counts.get("moved", 0), counts.get("resumed_midway", 0)
    yield "migrated", f"{midway:,} resumed midway; {moved:,} moved to balance the fleet"
    if moves is not None and moves.moves:
        yield "balanced", _balanced(moves)
    saved, lost = counts.get("tokens_resumed", 0), counts.get("tokens_lost_at_most", 0)
    yield "tokens", f"{counts.get('tokens_stored', 0):,} stored"
    yield "saved", f"{saved:,} tokens that were not generated again"
    yield "lost", f"at most {lost:,} tokens, with workers that died without notice"
    for name, what in (
        ("detection", "from a worker's silence or loss to its notice"),
        ("resume", "until generation resumes"),
    ):
        found = histogram(counts, name)
        if found.count:
            shares = ", ".join(f"p{share} {_bound(found.at_most(share / 100))}" for share in (50, 90, 99))
            yield name, f"{shares} ({found.count:,} observed, {what})"


def _balanced(moves: RunMoves) -> str:
    """What the moves of running rollouts promised, and what came of them."""
    told = f"{moves.moves:,} running rollouts moved"
    told += f", {moves.moves / moves.finished:.2f} for each finished one" if moves.finished else ""
    if moves.judged:
        told += (
            f"; {moves.judged:,} judged: {moves.made_tokens:,.0f} tokens made of {moves.promised_tokens:,.0f} promised"
        )
    return told + ("; stopped, as that is too little" if moves.stopped else "")


def _attempts_per_rollout(counts: Mapping[str, int]) -> str:
    found = histogram(counts, "attempts")
    if not found.count:
        return ""
    below = [0.0, *(bound for bound, _ in found.buckets)]
    told = [
        f"{count:,} had {_interval_text(low, high)}"
        for low, (high, count) in zip(below, found.buckets, strict=False)
        if count
    ]
    return f"; of finished rollouts {', '.join(told)}"


def _interval_text(below: float, last: float) -> str:
    """The whole numbers above `below` up to `last`."""
    if not math.isfinite(last):
        return "more"
    return f"{last:g}" if last == below + 1 else f"{below + 1:g}-{last:g}"


def _bound(value: float | None) -> str:
    return "> the largest bucket" if value is None or not math.isfinite(value) else f"≤ {value:g} s"


_POLL_S: Final = 0.5
_RECENT: Final = 20
#: Events whose message the screen shows; the others appear elsewhere on it.
_NEWS: Final = frozenset(
    {"status", "worker", "warning", "evaluation", "checkpoint", "resumed", "dead_letter", "round_opened"}
)


@dataclass(frozen=True)
class ResumedRun:
    """A rollout that resumed on another worker, after its first `offset` tokens."""

    rollout: str
    source: str
    target: str
    offset: int


@dataclass(frozen=True)
class EvaluationResult:
    step: int
    accuracy: float  # share of right answers
    problems: int
    at_s: float  # since the run's submission


@dataclass(frozen=True)
class WorkerInstall:
    """A worker's install of a version."""

    worker: str
    version: int
    pull_s: float  # fetched during generation
    pause_s: float  # generation paused


@dataclass(frozen=True)
class WorkerSample:
    """Sums since a worker's start, from a heartbeat."""

    uptime_s: float
    busy_s: float
    tokens: int


@dataclass
class RunProgress:
    run_id: str
    run: Run | None = None
    workers: list[Worker] = field(default_factory=list)
    #: step -> its event's values; a step that a resumed trainer trained again has the last ones
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    step_at_s: dict[int, float] = field(default_factory=dict)
    evaluations: list[EvaluationResult] = field(default_factory=list)
    resumed: list[ResumedRun] = field(default_factory=list)
    installs: list[WorkerInstall] = field(default_factory=list)
    #: worker -> the first and the newest sample taken while steps were trained
    samples: dict[str, list[WorkerSample]] = field(default_factory=dict)
    recent: dict[str, deque[WorkerSample]] = field(default_factory=dict)  # of the last ten seconds
    checkpoint: str = ""
    #: (seconds since the run's submission, text), newest last
    news: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=100))
    told: int = 0  # all news so far, with those that `news` has lost

    @property
    def spec(self) -> RunSpec | None:
        return self.run.spec if self.run else None

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each step so far, in order."""
        return [values["reward"] for _, values in sorted(self.steps.items()) if "reward" in values]

    def tell(self, text: str, at_s: float) -> None:
        self.news.append((at_s, text))
        self.told += 1

    def sample(self, workers: list[Worker]) -> None:
        """Takes in a listing of the fleet. `samples` leaves out evaluation and the wait for the first version."""
        self.workers = workers
        training = self.evaluations and not (self.spec and max(self.steps, default=0) >= self.spec.trainer.steps)
        for worker in workers:
            name, now = worker.worker_id, WorkerSample(worker.uptime_s, worker.busy_s, worker.tokens_generated)
            self.recent.setdefault(name, deque(maxlen=_RECENT)).append(now)
            if training:
                self.samples[name] = [*self.samples.get(name, [now])[:1], now]

    def rate(self, worker: Worker) -> float:
        """Tokens per second that a worker made lately, pauses included."""
        first, last = self.recent[worker.worker_id][0], self.recent[worker.worker_id][-1]
        seconds = last.uptime_s - first.uptime_s
        return (last.tokens - first.tokens) / seconds if seconds > 0 else 0.0

    def apply(self, event: RunEvent) -> None:
        """Takes in one event."""
        step = int(event.values.get("step", 0))
        if event.kind == "step":
            self.steps[step] = dict(event.values)
            self.step_at_s[step] = event.age_s
        elif event.kind == "evaluation" and "accuracy" in event.values:
            found = EvaluationResult(step, event.values["accuracy"], int(event.values["problems"]), event.age_s)
            self.evaluations.append(found)
        elif event.kind == "checkpoint":
            self.checkpoint = event.labels.get("path", "")
        elif event.kind == "installed":
            values, version = event.values, int(event.values["version"])
            self.installs.append(WorkerInstall(event.labels["worker"], version, values["pull_s"], values["pause_s"]))
        elif event.kind == "resumed" and "rollout" in event.labels:
            labels, offset = event.labels, int(event.values["offset"])
            self.resumed.append(ResumedRun(labels["rollout"], labels["from"], labels["to"], offset))
            return
        if event.kind in _NEWS:
            self.tell(event.message or f"{event.kind} {event.key}", event.age_s)


async def follow(client: "Client", progress: RunProgress) -> Run:
    """Keeps `progress` up to date until its run has ended. Returns the ended run."""
    polling = asyncio.create_task(_poll(client, progress))
    try:
        async for event in client.watch(progress.run_id):
            progress.apply(event)
        progress.run = await client.run(progress.run_id)
        return progress.run
    finally:
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)


async def _poll(client: "Client", progress: RunProgress) -> None:
    while True:
        with Waiting(coordinator_of(client)):
            progress.run = await client.run(progress.run_id)
            progress.sample(await client.workers())
        await asyncio.sleep(_POLL_S)


_REFRESH_S: Final = 0.25
#: Seconds between two details where the output is no terminal.
_DETAIL_S: Final = 5.0
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_WIDTH: Final = 40
_LATEST_NEWS: Final = 6
#: Steps have a line each: a run that works is not said to be waited for between two of them.
_QUIET_S: Final = 10.0


class RunScreen:
    """Shows phases and their seconds, a detail of the present one, a run's progress, and what `beside` draws."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.phases: dict[str, float] = {}
        self.progress: RunProgress | None = None
        self.beside: Callable[[], RenderableType] | None = None
        self._console = Console()
        self._began = self._phase_began = time.monotonic()
        self._present = self._detail = ""
        self._attached_at = 0.0
        self._printed = _Printed()
        self._waiting = Waiting(lambda: self._present or f"news of {self.title}", first_s=_QUIET_S)

    def phase(self, name: str) -> None:
        """Ends the present phase and begins another (empty: none)."""
        now = time.monotonic()
        if self._present:
            self.phases[self._present] = now - self._phase_began
        self._present, self._phase_began, self._detail = name, now, ""
        if name and not self._console.is_terminal:
            self._line(f"{name} ...")

    def detail(self, text: str) -> None:
        """Sets the detail of the present phase."""
        self._detail = text

    def attach(self, progress: RunProgress) -> None:
        """Show this run, which begins now."""
        self.progress, self._attached_at = progress, time.monotonic()

    def note(self, text: str) -> None:
        """Shows news that no event of the run brings."""
        if self.progress is not None:
            self.progress.tell(text, time.monotonic() - self._attached_at)
        else:
            self._console.print(plain(text), highlight=False, markup=False)

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Draws while the block runs; the last picture stays."""
        live = Live(get_renderable=self._render, console=self._console, auto_refresh=False)
        terminal = self._console.is_terminal
        refresh = live.refresh if terminal else self._print_news
        with live if terminal else self._waiting:
            drawing = asyncio.create_task(_repeat(refresh))
            try:
                yield
            finally:
                drawing.cancel()
                await asyncio.gather(drawing, return_exceptions=True)
                refresh()

    def _line(self, text: str) -> None:
        self._waiting.heard()
        print(f"{clock(time.monotonic() - self._began):>6}  {plain(text)}", flush=True)  # noqa: T201 - this is a command

    def _print_news(self) -> None:
        printed, now = self._printed, time.monotonic()
        if self._detail and self._detail != printed.detail and now > printed.detail_at + _DETAIL_S:
            printed.detail, printed.detail_at = self._detail, now
            self._line(self._detail)
        if (progress := self.progress) is None:
            return
        fresh = min(progress.told - printed.told, len(progress.news))
        for _, text in list(progress.news)[len(progress.news) - fresh :]:
            self._line(text)
        printed.told = progress.told
        for step in sorted(set(progress.steps) - printed.steps):
            printed.steps.add(step)
            self._line(_step_line(progress, step))

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [self._head()]
        if self._detail and self.beside is None:
            parts.append(Text(f"  {plain(self._detail)}", style="dim"))
        if (progress := self.progress) is not None and progress.run is not None:
            parts += [Text(), _numbers(progress), Text(), worker_table(progress.workers, progress.rate), Text()]
            parts += [
                Text(f"{clock(at):>6}  {plain(text)}", style="dim") for at, text in list(progress.news)[-_LATEST_NEWS:]
            ]
        if self.beside is not None:
            parts += [Text(), self.beside()]
        return Group(*parts)

    def _head(self) -> Text:
        text = Text.assemble((self.title, "bold"), f"  {clock(time.monotonic() - self._began)}   ")
        for name, seconds in self.phases.items():
            text.append(f"✔ {name} {seconds:.0f} s   ", style="green")
        return text.append(f"▸ {self._present}") if self._present else text


async def _repeat(refresh: Callable[[], None]) -> None:
    while True:
        refresh()
        await asyncio.sleep(_REFRESH_S)


class _Printed:
    """Records what was already written as lines."""

    def __init__(self) -> None:
        self.detail, self.detail_at = "", 0.0
        self.told = 0
        self.steps: set[int] = set()


def sparkline(values: Sequence[float], width: int = _WIDTH) -> str:
    """Draws `values` as a line of at most `width` blocks, scaled from the lowest to the highest value."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, int((value - low) / span * len(_BLOCKS)))] for value in means)


def _numbers(progress: RunProgress) -> Table:
    run = progress.run
    assert run is not None  # noqa: S101 - the caller looked
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    done, steps = max(progress.steps, default=0), run.spec.trainer.steps
    version = run.newest.version if run.newest else 0
    bar = Table.grid(padding=(0, 2))
    bar.add_row(ProgressBar(total=steps, completed=done, width=_WIDTH), f"{done}/{steps}   policy version {version}")
    table.add_row("steps", bar)
    if rewards := progress.rewards:
        table.add_row("reward", f"{sparkline(rewards)}  {rewards[0]:.2f} → {rewards[-1]:.2f}")
    if evaluations := progress.evaluations:
        told = "   ".join(f"{found.accuracy:.3f} at step {found.step}" for found in evaluations[-4:])
        table.add_row("accuracy", f"{told}   ({evaluations[0].problems} unseen problems)")
    counts = run.counters
    dropped, resumed = sum(run.dropped.values()), counts.get("resumed_midway", 0)
    sums = f"{counts.get('submitted', 0):,} submitted · {counts.get('trained', 0):,} trained · {dropped:,} dropped"
    table.add_row("rollouts", f"{sums} · {resumed:,} resumed midway · {counts.get('running', 0):,} running")
    return table


def _step_line(progress: RunProgress, step: int) -> str:
    values = progress.steps[step]
    steps = progress.spec.trainer.steps if progress.spec else step
    alive = [worker for worker in progress.workers if worker.state not in GONE]
    rates = ", ".join(f"{worker.worker_id} {progress.rate(worker):,.0f} tokens/s" for worker in alive)
    reward = f"reward {values['reward']:.3f}" if "reward" in values else "no reward"
    return f"step {step}/{steps}: {reward}, version {values.get('version', 0):.0f}; {rates}"


async def watch_run(client: "Client", run_id: str) -> RunStatus:
    """Shows a run until it has ended. Returns its final status. Raises `NotFound`."""
    with Waiting(coordinator_of(client)):
        progress = RunProgress(run_id, run=await client.run(run_id))
    screen = RunScreen(run_id)
    screen.attach(progress)
    async with screen.shown():
        return (await follow(client, progress)).status


def run_table(runs: Sequence[Run]) -> Table:
    table = plain_table("run", "status", "weight", "share", "step", "version", "trained", "dropped", "age", "")
    for run in sorted(runs, key=lambda run: run.age_s):
        trained, submitted = run.counters.get("trained", 0), run.counters.get("submitted", 0)
        step = f"{run.newest.step if run.newest else 0}/{run.spec.trainer.steps}"
        version = str(run.newest.version) if run.newest else "-"
        dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(run.dropped.items()) if count) or "0"
        share = f"{run.share.lately:.0%}" if run.share else ""
        standing = (run.run_id, run.status.name.lower(), f"{run.spec.share.weight:g}", share)
        cells = (step, version, f"{trained}/{submitted}", dropped, clock(run.age_s), run.message)
        table.add_row(*map(cell, (*standing, *cells)))
    return table
