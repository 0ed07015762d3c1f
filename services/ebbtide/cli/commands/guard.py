"""Defines `ebbtide guard`: the state of the serving-guard of this machine."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.cluster_connection import WATCH_PATIENCE_S, AsJson, Every, Watch, watching
from ebbtide.cli.waiting import Waiting

guard = typer.Typer(help="Show what a serving-guard observes and lends.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(guard, name="guard", rich_help_panel="Operation")


@guard.callback()
def _group() -> None:
    """Show what a serving-guard observes and lends."""


@guard.command()
def status(
    watch: Watch = False,
    every: Every = 0.5,
    as_json: AsJson = False,
    grant_dir: Annotated[
        Path | None,
        typer.Option(
            envvar=["EBBTIDE_GRANT_DIR", "EBBTIDE_SERVING_GUARD_GRANT_DIR"],
            help="Folder that the guard shares with the workers on its host.",
        ),
    ] = None,
    address: Annotated[str | None, typer.Option(help="Socket of the guard instead of its folder: unix:PATH.")] = None,
) -> None:
    """Show load, latencies against the SLO, slack, and the next rollout step's budget.

    Of a trainer's device it shows who has it.
    harvested: tokens generated on the lent device.
    slack: time until the first request in flight would miss its target.
    reclaims: p50 and p99 from a request's arrival to the end of the last rollout step.
    """
    from ebbtide.cli.views import guard as screen
    from ebbtide.cli.views.guard import guard_client
    from ebbtide.cli.views.tables import print_wide, to_json
    from ebbtide.errors import InvalidRequest
    from ebbtide.grants import socket_path

    if (grant_dir is None) == (address is None):
        raise InvalidRequest("name either the guard's folder or its --address", field="--grant-dir")
    where = socket_path(grant_dir) if grant_dir else Path(str(address).removeprefix("unix:"))

    async def look() -> None:
        async with guard_client(where) as client:
            with Waiting(f"the serving-guard at {where}"):
                state = await client.status()
        typer.echo(to_json(state)) if as_json else print_wide(screen.picture(state))

    async def follow() -> None:
        async with guard_client(where) as client:
            with Waiting(f"the serving-guard at {where}"):
                await client.status()  # nobody there is told at once
        async with guard_client(where, WATCH_PATIENCE_S) as client:
            await screen.watch_guard(client, every)

    with watching(as_json=as_json) if watch else nullcontext():
        asyncio.run(follow() if watch else look())
