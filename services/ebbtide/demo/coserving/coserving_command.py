"""Runs `ebbtide demo-coserving`, draws its timeline, and prints the verdict."""

from rich.console import Console

from ebbtide.cli.interrupts import run_demo_command
from ebbtide.cli.views.tables import fact_table
from ebbtide.demo.coserving.coserving_demo import run_coserving
from ebbtide.demo.coserving.coserving_options import CoservingOptions
from ebbtide.demo.coserving.coserving_picture import write_coserving_picture
from ebbtide.demo.coserving.coserving_report import told
from ebbtide.demo.report_summary import summary

#: Lines of the run's summary that the verdict does not repeat.
_RUN_LINES = ("accuracy", "rollouts", "logprob gap", "seconds", "checkpoint")


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
