"""Commands on the weights of runs, through the SDK."""

from typing import Annotated

import typer

from ebbtide.cli.cluster_connection import WATCH_PATIENCE_S, Relay, RunId, TokenFile, with_client


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Runs")(weights)


def weights(
    run_id: RunId,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="With --watch: seconds between two looks.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Once, for programs.")] = False,
    relay: Relay = None,
    token_file: TokenFile = None,
) -> None:
    """Tell which versions of a run's weights a relay has, what they take, who has them, and what went over which link.

    smaller: dense bytes over the patch's. changed: share of elements. stood still: generation, for the install.
    """
    from ebbtide.cli.views import weights_screen as screen
    from ebbtide.errors import InvalidRequest

    if not watch:
        state = with_client(lambda client: client.describe_weights(run_id), None, token_file, relay=relay)
        screen.tell(state, as_json=as_json)
        return
    if as_json:
        raise InvalidRequest("not together with --watch; ask again and again", field="--json")
    try:
        with_client(
            lambda client: screen.watch_weights(client, run_id, every), None, token_file, WATCH_PATIENCE_S, relay
        )
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
