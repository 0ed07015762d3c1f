"""`ebbtide demo` for a person: runs it, writes and prints the report, and says where the logs are if there is none."""

from rich.console import Console
from rich.table import Table

from ebbtide.cli.interrupts import run_demo_command
from ebbtide.cli.views.tables import cell
from ebbtide.cli.views.timeline_files import write
from ebbtide.demo.demo import DemoOptions, run_demo
from ebbtide.demo.report_picture import terminal_curve, write_picture
from ebbtide.demo.report_summary import summary


def run(options: DemoOptions) -> int:
    """Exit status: 0 if the run ended well and its sums agree."""

    async def main() -> int:
        report, timeline, path = await run_demo(options)
        write_picture(report, path.with_suffix(".png"))
        drawn = write(timeline, path.parent)
        console = Console()
        print(f"\n{terminal_curve(report, min(100, console.width))}\n")  # noqa: T201 - rich would wrap it
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        for name, text in summary(report, path):
            table.add_row(name, cell(text))
        table.add_row("timeline", cell(", ".join(map(str, drawn))))
        console.print(table, highlight=False)
        return 0 if report.rollouts_accounted_for else 1

    return run_demo_command(main, options.run_dir / "logs")
