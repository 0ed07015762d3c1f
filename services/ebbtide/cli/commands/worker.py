"""Defines `ebbtide worker`: the workers of a cluster."""

from typing import Annotated

import typer

from ebbtide.cli.cluster_connection import AsJson, Coordinator, Every, TokenFile, Watch, watching, with_client

worker = typer.Typer(help="List and drain workers.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(worker, name="worker", rich_help_panel="Cluster")


@worker.command("list")
def list_workers(
    watch: Watch = False,
    every: Every = 1.0,
    as_json: AsJson = False,
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
) -> None:
    """List the workers and what each of them is doing.

    load: rollouts / those without a token yet / slots on offer.
    plateau: rollouts at which the worker's throughput flattens.
    tok/s: of all its rollouts / of each one, as learnt.
    """
    from ebbtide.cli.views.fleet import fleet_table, watch_fleet
    from ebbtide.cli.views.tables import print_table, to_json

    if not watch:
        found = with_client(lambda client: client.workers(), coordinator, token_file)
        typer.echo(to_json(found)) if as_json else print_table(fleet_table(found))
        return
    with watching(as_json=as_json):
        with_client(lambda client: watch_fleet(client, every), coordinator, token_file, watches=True)


@worker.command()
def drain(
    name: Annotated[
        str, typer.Argument(metavar="WORKER", help="Name of the worker, as `ebbtide worker list` shows it.")
    ],
    within: Annotated[
        str, typer.Option(metavar="DURATION", help="Time to hand over all rollouts: 30, 30s, 2m or 1h.")
    ] = "30s",
    wait: Annotated[bool, typer.Option(help="Wait until the worker has left.")] = True,
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
) -> None:
    """Have a worker hand its rollouts over to other workers and leave.

    Tokens that cannot be handed over within --within are generated again.
    """
    from ebbtide.cli.cluster_connection import seconds
    from ebbtide.cli.views.fleet import drain_worker

    within_s = seconds(within, field="--within")
    with_client(lambda client: drain_worker(client, name, within_s, wait=wait), coordinator, token_file)
