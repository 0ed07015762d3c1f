"""Commands on the runs of a cluster, through the SDK."""

from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.cluster_connection import WATCH_PATIENCE_S, Coordinator, RunId, TokenFile, with_client


def register(app: typer.Typer) -> None:
    for command in (submit, runs, watch, timeline, cancel):
        app.command(rich_help_panel="Runs")(command)


def submit(
    spec: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run's spec.")],
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
    run_id: Annotated[str | None, typer.Option(help="Id of the run; submitting it again changes nothing.")] = None,
    check: Annotated[
        bool, typer.Option(help="Try the environment and read the model here; --no-check where they are elsewhere.")
    ] = True,
    follow: Annotated[bool, typer.Option("--watch", "-w", help="Watch the run until it has ended.")] = False,
) -> None:
    """Check a run's spec and submit it."""
    from ebbtide.cli import submit_preflight

    checked = submit_preflight.check(spec, deep=check)
    run = with_client(lambda client: client.submit(checked, run_id), coordinator, token_file)
    typer.echo(run.run_id)
    if follow:
        watch(run.run_id, coordinator, token_file)


def runs(
    run_id: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Tell all of one run.")] = None,
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
) -> None:
    """List the runs, or tell what became of one run's rollouts and tokens."""
    from ebbtide.cli.views.tables import print_table, run_table

    if run_id is None:
        print_table(run_table(with_client(lambda client: client.runs(), coordinator, token_file)))
        return
    from ebbtide.cli.views.run_detail import detail_table

    wanted = run_id
    print_table(detail_table(with_client(lambda client: client.run(wanted), coordinator, token_file)))


def cancel(run_id: RunId, coordinator: Coordinator = None, token_file: TokenFile = None) -> None:
    """End a run; what it has under way is dropped."""
    run = with_client(lambda client: client.cancel(run_id), coordinator, token_file)
    typer.echo(f"{run.run_id} {run.status.name.lower()}")


def watch(run_id: RunId, coordinator: Coordinator = None, token_file: TokenFile = None) -> None:
    """Watch a run live until it has ended. Ctrl-C ends the watching alone."""
    from ebbtide.cli.views.run_screen import watch_run

    status = with_client(lambda client: watch_run(client, run_id), coordinator, token_file, WATCH_PATIENCE_S)
    raise typer.Exit(0 if status.name == "FINISHED" else 1)


def timeline(
    run_id: RunId,
    out: Annotated[Path, typer.Option(help="Directory for timeline.json and timeline.png.")] = Path(),
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
) -> None:
    """Write which worker generated which rollout when: for ui.perfetto.dev (JSON), and as a picture (PNG)."""
    from ebbtide.cli.views.timeline_files import fetch, write

    told = with_client(lambda client: fetch(client, run_id), coordinator, token_file)
    for path in write(told, out):
        typer.echo(path)
