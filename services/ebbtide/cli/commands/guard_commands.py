"""Commands on the serving-guard of this machine."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.cluster_connection import WATCH_PATIENCE_S

_PANEL = "Serving"

guard = typer.Typer(help="Tell what a serving-guard sees and grants.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(guard, name="guard", rich_help_panel=_PANEL)


@guard.callback()
def _group() -> None:
    """Tell what a serving-guard sees and grants."""


@guard.command()
def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="With --watch: seconds between two looks.")] = 0.5,
    as_json: Annotated[bool, typer.Option("--json", help="Once, for programs.")] = False,
    grant_dir: Annotated[
        Path | None,
        typer.Option(
            envvar=["EBBTIDE_GRANT_DIR", "EBBTIDE_SERVING_GUARD_GRANT_DIR"],
            help="Folder that the guard shares with the workers beside it.",
        ),
    ] = None,
    address: Annotated[str | None, typer.Option(help="The guard's socket instead: unix:PATH.")] = None,
) -> None:
    """Tell load, latencies against the SLO, slack, what the next rollout step may take, and what was harvested.

    slack: the least of all requests inside, before one would miss its target. reclaims: p50 and p99 from a request's
    arrival to the end of the last rollout step.
    """
    from ebbtide.cli.views import guard_screen as screen
    from ebbtide.cli.views.guard_client import guard_client
    from ebbtide.errors import InvalidRequest
    from ebbtide.grants import socket_path

    if (grant_dir is None) == (address is None):
        raise InvalidRequest("name the guard's folder, or its --address instead", field="--grant-dir")
    if watch and as_json:
        raise InvalidRequest("not together with --watch; ask again and again", field="--json")
    where = socket_path(grant_dir) if grant_dir else Path(str(address).removeprefix("unix:"))

    async def ask() -> None:
        async with guard_client(where, WATCH_PATIENCE_S if watch else 0.0) as client:
            if watch:
                await screen.watch_guard(client, every)
            else:
                screen.tell(await client.status(), as_json=as_json)

    try:
        asyncio.run(ask())
    except KeyboardInterrupt:
        raise typer.Exit(0 if watch else 130) from None
