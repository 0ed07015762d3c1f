"""`ebbtide demo-coserving` for a person: runs it, draws the timeline, and tells the verdict."""

from rich.console import Console
from rich.table import Table

from ebbtide.cli.interrupts import run_demo_command
from ebbtide.cli.views.tables import cell
from ebbtide.demo.coserving.coserving_demo import CoservingOutcome, run_coserving
from ebbtide.demo.coserving.coserving_options import CoservingOptions
from ebbtide.demo.coserving.coserving_picture import write_coserving_picture
from ebbtide.demo.coserving.coserving_report import told
from ebbtide.demo.report_summary import summary

#: What the run's own summary says that the verdict does not.
_RUN_LINES = ("accuracy", "rollouts", "logprob gap", "seconds", "checkpoint")


def run(options: CoservingOptions) -> int:
    """Exit status: 0 if the run ended well, its sums agree and no token was lost. Whether the SLO was attained is a
    result, not a failure."""

    async def main() -> int:
        outcome, path = await run_coserving(options)
        picture = path.with_name("timeline.png")
        write_coserving_picture(outcome.replay, picture)
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        for name, text in told(outcome.coserving):
            table.add_row(name, cell(text))
        for name, text in summary(outcome.run, path):
            if name in _RUN_LINES:
                table.add_row(name, cell(text))
        table.add_row("timeline", cell(str(picture)))
        table.add_row("report", cell(str(path)))
        Console().print(table, highlight=False)
        return 0 if _sound(outcome) else 1

    return run_demo_command(main, options.run_dir / "logs")


def _sound(outcome: CoservingOutcome) -> bool:
    return outcome.run.rollouts_accounted_for and not outcome.coserving.tokens_lost
