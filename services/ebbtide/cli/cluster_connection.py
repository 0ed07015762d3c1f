"""Connects commands to a cluster: shared options, a client, and the choice between one look, JSON and watching."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from ebbtide.errors import InvalidRequest

if TYPE_CHECKING:
    from ebbtide.client import Client

T = TypeVar("T")

#: A person waits for the answer, so an unreachable coordinator is reported soon; watchers wait longer.
_PATIENCE_S: Final = 5.0
WATCH_PATIENCE_S: Final = 60.0

Coordinator = Annotated[
    str | None,
    typer.Option(
        envvar="EBBTIDE_COORDINATOR",
        help="Address of the coordinator. Separate several by commas.",
        show_default="127.0.0.1:7600",
    ),
]
Relay = Annotated[
    str | None, typer.Option(envvar="EBBTIDE_RELAY", help="Address of the weight-relay.", show_default="127.0.0.1:7610")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        envvar="EBBTIDE_TOKEN_FILE",
        help="File with the cluster's token. EBBTIDE_TOKEN may hold it instead.",
    ),
]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Watch until Ctrl-C.")]
Every = Annotated[float, typer.Option(min=0.1, help="With --watch: seconds between two looks.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the state once, as JSON.")]


def with_client(
    ask: "Callable[[Client], Awaitable[T]]",
    coordinator: str | None,
    token_file: Path | None,
    patience_s: float = _PATIENCE_S,
    relay: str | None = None,
) -> T:
    """Returns what `ask` returns. Raises its errors, and `InvalidRequest` for an unreadable token file."""
    token = _read(token_file)

    async def ask_it() -> T:
        from ebbtide.client import Client

        async with Client(coordinator, relay, token=token, patience_s=patience_s) as client:
            return await ask(client)

    return asyncio.run(ask_it())


@contextmanager
def watching(*, as_json: bool = False) -> Iterator[None]:
    """Ends a watching command well on Ctrl-C. Raises `InvalidRequest` if JSON is asked for too."""
    if as_json:
        raise InvalidRequest("excludes --watch; call it again and again", field="--json")
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def token_of(file: Path | None) -> str:
    """The cluster's token. Raises `InvalidRequest` if there is none, or the file cannot be read."""
    from ebbtide.auth.security import ClientSecurity

    text = os.environ.get("EBBTIDE_TOKEN", "") if file is None else _read(file) or ""
    return ClientSecurity(token=text).bearer().removeprefix("Bearer ")


def _read(file: Path | None) -> str | None:
    try:
        return None if file is None else file.read_text(errors="replace").strip()
    except OSError as error:
        raise InvalidRequest(f"{str(file)!r} cannot be read ({error.strerror})", field="--token-file") from None
