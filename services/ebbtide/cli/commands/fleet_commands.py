"""Commands on the workers of a cluster, through the SDK."""

from typing import Annotated

import typer

from ebbtide.cli.cluster_connection import WATCH_PATIENCE_S, Coordinator, TokenFile, with_client

_PANEL = "Workers"


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=_PANEL)(workers)
    app.command(rich_help_panel=_PANEL)(drain)


def workers(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="With --watch: seconds between two looks.")] = 1.0,
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
) -> None:
    """List the workers, and what each of them is doing.

    load: rollouts / those of them without a token yet / slots. plateau: rollouts at which its throughput flattens.
    """
    from ebbtide.cli.views.fleet_screen import fleet_table, watch_fleet
    from ebbtide.cli.views.tables import print_table

    if not watch:
        print_table(fleet_table(with_client(lambda client: client.workers(), coordinator, token_file)))
        return
    try:
        with_client(lambda client: watch_fleet(client, every), coordinator, token_file, WATCH_PATIENCE_S)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Its name, as `ebbtide workers` lists it.")],
    within: Annotated[
        str, typer.Option(metavar="DURATION", help="By when it has handed everything over: 30, 30s, 2m or 1h.")
    ] = "30s",
    wait: Annotated[bool, typer.Option(help="Wait until it has left.")] = True,
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
) -> None:
    """Have a worker hand over its rollouts to others and leave; no token is lost."""
    from ebbtide.cli.commands.drain_command import drain_worker
    from ebbtide.cli.durations import seconds

    within_s = seconds(within, field="--within")
    with_client(lambda client: drain_worker(client, worker, within_s, wait=wait), coordinator, token_file)
