"""Commands on the runs and workers of a cluster, through the SDK."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from ebbtide.client import Client

T = TypeVar("T")

#: A person waits for the answer, so a coordinator that is away is soon told; watchers wait longer.
_PATIENCE_S = 5.0
_WATCH_PATIENCE_S = 60.0

Coordinator = Annotated[
    str | None,
    typer.Option(envvar="EBBTIDE_COORDINATOR", help="Address of the coordinator.", show_default="127.0.0.1:7600"),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(envvar="EBBTIDE_TOKEN_FILE", help="File that holds the cluster's token; or set EBBTIDE_TOKEN."),
]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run.")]


def register(app: typer.Typer) -> None:
    for command in (submit, runs, watch, cancel, workers):
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
    from ebbtide.cli import preflight

    checked = preflight.check(spec, deep=check)
    run = asyncio.run(_with_client(lambda client: client.submit(checked, run_id), coordinator, token_file))
    typer.echo(run.run_id)
    if follow:
        watch(run.run_id, coordinator, token_file)


def runs(coordinator: Coordinator = None, token_file: TokenFile = None) -> None:
    """List the runs."""
    from ebbtide.cli.tables import print_table, run_table

    print_table(run_table(asyncio.run(_with_client(lambda client: client.runs(), coordinator, token_file))))


def workers(coordinator: Coordinator = None, token_file: TokenFile = None) -> None:
    """List the workers, and what each of them is doing."""
    from ebbtide.cli.tables import print_table, worker_table

    print_table(worker_table(asyncio.run(_with_client(lambda client: client.workers(), coordinator, token_file))))


def cancel(run_id: RunId, coordinator: Coordinator = None, token_file: TokenFile = None) -> None:
    """End a run; what it has under way is dropped."""
    run = asyncio.run(_with_client(lambda client: client.cancel(run_id), coordinator, token_file))
    typer.echo(f"{run.run_id} {run.status.name.lower()}")


def watch(run_id: RunId, coordinator: Coordinator = None, token_file: TokenFile = None) -> None:
    """Watch a run live until it has ended. Ctrl-C ends the watching alone."""
    from ebbtide.cli.screen import watch_run

    status = asyncio.run(
        _with_client(lambda client: watch_run(client, run_id), coordinator, token_file, _WATCH_PATIENCE_S)
    )
    raise typer.Exit(0 if status.name == "FINISHED" else 1)


async def _with_client(
    ask: "Callable[[Client], Awaitable[T]]",
    coordinator: str | None,
    token_file: Path | None,
    patience_s: float = _PATIENCE_S,
) -> T:
    from ebbtide.client import Client

    async with Client(coordinator, token=_token(token_file), patience_s=patience_s) as client:
        return await ask(client)


def _token(file: Path | None) -> str | None:
    from ebbtide.errors import InvalidRequest

    try:
        return None if file is None else file.read_text(errors="replace").strip()
    except OSError as error:
        raise InvalidRequest(f"{str(file)!r} cannot be read ({error.strerror})", field="--token-file") from None
