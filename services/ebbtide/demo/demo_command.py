"""Runs `ebbtide demo`, draws and prints its report, and names the logs if it fails."""

from rich.console import Console

from ebbtide.cli.interrupts import run_demo_command
from ebbtide.cli.views.tables import fact_table
from ebbtide.cli.views.timeline_files import write
from ebbtide.demo.demo import DemoOptions, run_demo
from ebbtide.demo.report_picture import terminal_curve, write_picture
from ebbtide.demo.report_summary import summary


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
