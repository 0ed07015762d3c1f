"""Shows a run on one live screen, or as plain lines where the output is no terminal.

Invariant: a screen only reads the `RunProgress` that it shows. A terminal is drawn again several times a second; other
outputs get each piece of news once. Nothing is stored.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ebbtide.cli.cluster_connection import coordinator_of
from ebbtide.cli.views.run_progress import RunProgress, follow
from ebbtide.cli.views.tables import GONE, clock, plain, worker_table
from ebbtide.cli.waiting import Waiting
from ebbtide.types.run import RunStatus

if TYPE_CHECKING:
    from ebbtide.client import Client

_REFRESH_S: Final = 0.25
#: Seconds between two details where the output is no terminal.
_DETAIL_S: Final = 5.0
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_WIDTH: Final = 40
_NEWS: Final = 6
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
            parts += [Text(f"{clock(at):>6}  {plain(text)}", style="dim") for at, text in list(progress.news)[-_NEWS:]]
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
