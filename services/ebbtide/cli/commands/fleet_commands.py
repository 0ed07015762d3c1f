"""Defines the commands on the workers of a cluster."""

from typing import Annotated

import typer

from ebbtide.cli.cluster_connection import AsJson, Coordinator, Every, TokenFile, Watch, watching, with_client

_PANEL = "Workers"


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=_PANEL)(workers)
    app.command(rich_help_panel=_PANEL)(drain)


def workers(
    watch: Watch = False,
    every: Every = 1.0,
    as_json: AsJson = False,
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
) -> None:
    """List the workers, and what each of them is doing.

    load: rollouts / those without a token yet / slots that it offers. plateau: rollouts at which the worker's
    throughput flattens. tok/s: of all its rollouts / of each one, as learnt.
    """
    from ebbtide.cli.views.fleet import fleet_table, watch_fleet
    from ebbtide.cli.views.tables import print_table, to_json

    if not watch:
        found = with_client(lambda client: client.workers(), coordinator, token_file)
        typer.echo(to_json(found)) if as_json else print_table(fleet_table(found))
        return
    with watching(as_json=as_json):
        with_client(lambda client: watch_fleet(client, every), coordinator, token_file, watches=True)


def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Name of the worker, as `ebbtide workers` lists it.")],
    within: Annotated[
        str, typer.Option(metavar="DURATION", help="Time to hand everything over: 30, 30s, 2m or 1h.")
    ] = "30s",
    wait: Annotated[bool, typer.Option(help="Wait until the worker has left.")] = True,
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
) -> None:
    """Make a worker hand over its rollouts to others and leave. No token is lost."""
    from ebbtide.cli.cluster_connection import seconds
    from ebbtide.cli.views.fleet import drain_worker

    within_s = seconds(within, field="--within")
    with_client(lambda client: drain_worker(client, worker, within_s, wait=wait), coordinator, token_file)
