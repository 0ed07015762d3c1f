"""Defines `ebbtide run`: the runs of a cluster, from their submission to their timelines and weights."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from ebbtide.client import Client

run = typer.Typer(help="Submit, watch, cancel and inspect runs.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(run, name="run", rich_help_panel="Cluster")


@run.command()
def submit(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="Spec of the run, a TOML file.")],
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
    run_id: Annotated[
        str | None, typer.Option(help="Id of the run; submitting the same id again changes nothing.")
    ] = None,
    check: Annotated[
        bool, typer.Option(help="Check environment and model on this machine; use --no-check if they are elsewhere.")
    ] = True,
    follow: Annotated[bool, typer.Option("--watch", "-w", help="Watch the run until it ends.")] = False,
) -> None:
    """Check a spec and submit it as a run."""
    from ebbtide.cli import submit_preflight

    checked = submit_preflight.check(spec, deep=check)
    record = with_client(lambda client: durably(client, client.submit(checked, run_id)), coordinator, token_file)
    typer.echo(record.run_id)
    if follow:
        watch(record.run_id, coordinator, token_file)


@run.command("list")
def list_runs(as_json: AsJson = False, coordinator: Coordinator = None, token_file: TokenFile = None) -> None:
    """List the runs of a cluster."""
    from ebbtide.cli.views.run import run_table
    from ebbtide.cli.views.tables import print_table, to_json

    found = with_client(lambda client: client.runs(), coordinator, token_file)
    typer.echo(to_json(found)) if as_json else print_table(run_table(found))


@run.command()
def show(run_id: RunId, as_json: AsJson = False, coordinator: Coordinator = None, token_file: TokenFile = None) -> None:
    """Show one run: its progress, and what became of its rollouts and tokens."""
    from ebbtide.cli.views.run import detail_table
    from ebbtide.cli.views.tables import print_table, to_json

    found = with_client(lambda client: client.run(run_id), coordinator, token_file)
    typer.echo(to_json(found)) if as_json else print_table(detail_table(found))


@run.command()
def watch(run_id: RunId, coordinator: Coordinator = None, token_file: TokenFile = None) -> None:
    """Watch a run live until it ends. Ctrl-C stops watching, not the run."""
    from ebbtide.cli.views.run import watch_run

    status = with_client(lambda client: watch_run(client, run_id), coordinator, token_file, watches=True)
    raise typer.Exit(0 if status.name == "FINISHED" else 1)


@run.command()
def cancel(run_id: RunId, coordinator: Coordinator = None, token_file: TokenFile = None) -> None:
    """Cancel a run and drop its unfinished rollouts."""
    ended = with_client(lambda client: durably(client, client.cancel(run_id)), coordinator, token_file)
    typer.echo(f"{ended.run_id} {ended.status.name.lower()}")


@run.command()
def chat(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Id of a live run, or its name.")],
    message: Annotated[
        str | None,
        typer.Argument(metavar="MESSAGE", help="Ask only this; without it, chat, or read one message from a pipe."),
    ] = None,
    gateway: Annotated[
        str, typer.Option(envvar="EBBTIDE_GATEWAY", help="URL of the gateway.")
    ] = "http://127.0.0.1:7640",
    token_file: TokenFile = None,
    tls_ca: Annotated[
        str,
        typer.Option(
            envvar="EBBTIDE_TLS_CA", help="PEM file of the authorities that may sign the gateway's certificate."
        ),
    ] = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature.")] = None,
    version: Annotated[int, typer.Option(min=0, help="Policy version to chat with; 0 takes the newest.")] = 0,
) -> None:
    """Chat with a run's policy through a gateway. Ctrl-C stops an answer, Ctrl-D ends the chat.

    It uses the chat template of the model, and shows after each answer which policy versions generated it.
    """
    from ebbtide.cli.chat import ChatOptions, GatewayTarget
    from ebbtide.cli.chat import run as run_chat

    if message is None and not sys.stdin.isatty():
        with Waiting("the message, to the end of standard input"):
            message = sys.stdin.read().strip()
    options = ChatOptions(system=system, max_tokens=max_tokens, temperature=temperature, version=version)
    with token_explained():
        run_chat(GatewayTarget(url=gateway, key=token_of(token_file), authority=tls_ca), run_id, options, message)


@run.command()
def samples(
    run_id: RunId,
    step: Annotated[
        int | None, typer.Option(min=1, help="Only those that this optimiser step trains on, from 1 on.")
    ] = None,
    group: Annotated[str, typer.Option(help="Only those of this group, such as s0.g3.")] = "",
    worst: Annotated[bool, typer.Option("--worst", help="The lowest rewards first.")] = False,
    most: Annotated[int, typer.Option("--most", "-n", min=1, help="Maximum number of samples.")] = 8,
    model: Annotated[str, typer.Option(help="Folder with the run's tokenizer, if its model is not here.")] = "",
    as_json: AsJson = False,
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
) -> None:
    """Show prompts, responses, rewards, versions, and the workers that generated them.

    The coordinator has episodes until a durable checkpoint holds them (`trainer.checkpoint_every`). Of earlier steps
    there are those that the trainer kept in OUTPUT/RUN/samples.jsonl, if that is on this machine.
    """
    from ebbtide.cli.views import samples as view
    from ebbtide.cli.views.tables import to_json

    wanted = view.SampleFilter(step=step, group=group, worst=worst, most=most)
    found = with_client(lambda client: view.fetch(client, run_id, wanted, model), coordinator, token_file)
    typer.echo(to_json(found)) if as_json else view.print_samples(found)


@run.command()
def timeline(
    run_id: RunId,
    out: Annotated[Path, typer.Option(help="Folder for timeline.json and timeline.png.")] = Path(),
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
) -> None:
    """Write which worker generated which rollout when, as JSON for ui.perfetto.dev and as a PNG picture."""
    from ebbtide.cli.views.timeline import fetch, write

    told = with_client(lambda client: fetch(client, run_id), coordinator, token_file)
    for path in write(told, out):
        typer.echo(path)


@run.command()
def weights(
    run_id: RunId,
    watch: Watch = False,
    every: Every = 1.0,
    as_json: AsJson = False,
    relay: Relay = None,
    token_file: TokenFile = None,
) -> None:
    """List the policy versions of a run on its weight-relay, with sizes, holders, and traffic per link.

    smaller: dense bytes over the patch's. changed: share of elements.
    paused: for how long generation paused for the install.
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


@run.command()
def usage(
    run_id: RunId, as_json: AsJson = False, coordinator: Coordinator = None, token_file: TokenFile = None
) -> None:
    """Show how much of their limits the clients' keys of a run have used, by owner."""
    from ebbtide.cli.views.tables import print_table, to_json, usage_table

    found = with_client(lambda client: client.key_usage(run_id), coordinator, token_file)
    typer.echo(to_json(found)) if as_json else print_table(usage_table(found))


@run.command()
def push(
    run_id: RunId,
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository on the Hugging Face Hub.")],
    step: Annotated[int, typer.Option(min=0, help="Step of the checkpoint; 0 takes the newest.")] = 0,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public.")] = False,
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
) -> None:
    """Push a checkpoint's weights and tokenizer to the Hugging Face Hub. Run it on the trainer's machine.

    The Hub's token is that of `hf auth login`, or `HF_TOKEN`. The state of the training is left out.
    """
    from ebbtide.hub_models import push_folder

    found, folder = with_client(lambda client: newest_checkpoint(client, run_id, step), coordinator, token_file)
    with Waiting(f"the upload of {folder}"):
        url = push_folder(folder, repository, private=not public, message=f"Step {found} of run {run_id} of Ebbtide")
    typer.echo(url)


async def newest_checkpoint(client: "Client", run_id: str, step: int) -> tuple[int, Path]:
    """Step and folder of a run's checkpoint; of `step` 0, the newest. Raises `InvalidRequest` if it is not here."""
    from ebbtide.cli.views.timeline import fetch_events
    from ebbtide.errors import InvalidRequest
    from ebbtide.run_client import CHECKPOINT

    events = [event for event in await fetch_events(client, run_id) if event.kind == CHECKPOINT]
    folders = {int(event.values["step"]): Path(event.labels["path"]) for event in events}
    found = step or max(folders, default=0)
    if found not in folders:
        known = ", ".join(map(str, sorted(folders))) or "none yet"
        raise InvalidRequest(f"the run has no checkpoint of step {found}; it has {known}", field="--step")
    if not folders[found].is_dir():
        text = f"{str(folders[found])!r} is not there: it is on the trainer's machine, or was removed for newer ones"
        raise InvalidRequest(text, field="--step")
    return found, folders[found]
