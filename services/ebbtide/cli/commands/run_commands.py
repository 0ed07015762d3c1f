"""Defines the commands on the runs of a cluster and on their weights."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.cluster_connection import (
    AsJson,
    Coordinator,
    Every,
    Relay,
    RunId,
    TokenFile,
    Watch,
    durably,
    token_explained,
    token_of,
    watching,
    with_client,
)
from ebbtide.cli.waiting import Waiting


def register(app: typer.Typer) -> None:
    for command in (submit, runs, watch, chat, timeline, cancel, weights, usage):
        app.command(rich_help_panel="Runs")(command)


def submit(
    spec: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run's spec.")],
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
    run_id: Annotated[str | None, typer.Option(help="Id of the run. Submitting it again changes nothing.")] = None,
    check: Annotated[
        bool, typer.Option(help="Try the environment and read the model here. Use --no-check if they are elsewhere.")
    ] = True,
    follow: Annotated[bool, typer.Option("--watch", "-w", help="Watch the run until it has ended.")] = False,
) -> None:
    """Check a run's spec and submit it."""
    from ebbtide.cli import submit_preflight

    checked = submit_preflight.check(spec, deep=check)
    run = with_client(lambda client: durably(client, client.submit(checked, run_id)), coordinator, token_file)
    typer.echo(run.run_id)
    if follow:
        watch(run.run_id, coordinator, token_file)


def runs(
    run_id: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Show this run in detail.")] = None,
    as_json: AsJson = False,
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
) -> None:
    """List the runs, or show what became of one run's rollouts and tokens."""
    from ebbtide.cli.views.run import detail_table, run_table
    from ebbtide.cli.views.tables import print_table, to_json

    if run_id is None:
        found = with_client(lambda client: client.runs(), coordinator, token_file)
        typer.echo(to_json(found)) if as_json else print_table(run_table(found))
        return
    run = with_client(lambda client: client.run(run_id), coordinator, token_file)
    typer.echo(to_json(run)) if as_json else print_table(detail_table(run))


def cancel(run_id: RunId, coordinator: Coordinator = None, token_file: TokenFile = None) -> None:
    """End a run. Its unfinished rollouts are dropped."""
    run = with_client(lambda client: durably(client, client.cancel(run_id)), coordinator, token_file)
    typer.echo(f"{run.run_id} {run.status.name.lower()}")


def watch(run_id: RunId, coordinator: Coordinator = None, token_file: TokenFile = None) -> None:
    """Watch a run live until it has ended. Ctrl-C ends only the watching."""
    from ebbtide.cli.views.run import watch_run

    status = with_client(lambda client: watch_run(client, run_id), coordinator, token_file, watches=True)
    raise typer.Exit(0 if status.name == "FINISHED" else 1)


def chat(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Id of a live run, or its name.")],
    message: Annotated[
        str | None, typer.Argument(metavar="[MESSAGE]", help="Ask this alone. Without it, talk; a pipe is one message.")
    ] = None,
    gateway: Annotated[str, typer.Option(envvar="EBBTIDE_GATEWAY", help="URL of a gateway.")] = "http://127.0.0.1:7640",
    token_file: TokenFile = None,
    tls_ca: Annotated[
        str, typer.Option(envvar="EBBTIDE_TLS_CA", help="PEM file of the authorities of the gateway's certificate.")
    ] = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature.")] = None,
    version: Annotated[int, typer.Option(min=0, help="Talk to this policy version. 0: the newest.")] = 0,
) -> None:
    """Talk to a run's newest policy, through a gateway. Ctrl-C stops an answer, Ctrl-D ends the chat.

    The chat template is the model's own. Each answer is followed by the policy versions that wrote it.
    """
    from ebbtide.cli.chat import ChatOptions, GatewayTarget, run

    if message is None and not sys.stdin.isatty():
        with Waiting("the message, to the end of standard input"):
            message = sys.stdin.read().strip()
    options = ChatOptions(system=system, max_tokens=max_tokens, temperature=temperature, version=version)
    with token_explained():
        run(GatewayTarget(url=gateway, key=token_of(token_file), authority=tls_ca), run_id, options, message)


def timeline(
    run_id: RunId,
    out: Annotated[Path, typer.Option(help="Directory for timeline.json and timeline.png.")] = Path(),
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
) -> None:
    """Write a run's rollouts per worker over time, as JSON for ui.perfetto.dev and as a PNG picture."""
    from ebbtide.cli.views.timeline import fetch, write

    told = with_client(lambda client: fetch(client, run_id), coordinator, token_file)
    for path in write(told, out):
        typer.echo(path)


def weights(
    run_id: RunId,
    watch: Watch = False,
    every: Every = 1.0,
    as_json: AsJson = False,
    relay: Relay = None,
    token_file: TokenFile = None,
) -> None:
    """List the versions of a run's weights that a relay has, with sizes, holders, and traffic per link.

    smaller: dense bytes over the patch's. changed: share of elements. stood still: pause of generation for the install.
    """
    from ebbtide.cli.views import weights_screen as screen
    from ebbtide.cli.views.tables import print_wide, to_json

    if not watch:
        state = with_client(lambda one: one.describe_weights(run_id), None, token_file, relay=relay, of_relay=True)
        typer.echo(to_json(state)) if as_json else print_wide(screen.pictures(state))
        return
    with watching(as_json=as_json):
        with_client(
            lambda client: screen.watch_weights(client, run_id, every),
            None,
            token_file,
            relay=relay,
            of_relay=True,
            watches=True,
        )


def usage(
    run_id: RunId, as_json: AsJson = False, coordinator: Coordinator = None, token_file: TokenFile = None
) -> None:
    """Show what clients' keys with limits have used of a run, by their owners."""
    from ebbtide.cli.views.tables import print_table, to_json, usage_table

    found = with_client(lambda client: client.key_usage(run_id), coordinator, token_file)
    typer.echo(to_json(found)) if as_json else print_table(usage_table(found))
