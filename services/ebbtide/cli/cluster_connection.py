"""What all commands on a cluster share: where it is, and a client of it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

if TYPE_CHECKING:
    from ebbtide.client import Client

T = TypeVar("T")

#: A person waits for the answer, so a coordinator that is away is soon told; watchers wait longer.
_PATIENCE_S: Final = 5.0
WATCH_PATIENCE_S: Final = 60.0

Coordinator = Annotated[
    str | None,
    typer.Option(
        envvar="EBBTIDE_COORDINATOR",
        help="Address of the coordinator; of several, with commas between them.",
        show_default="127.0.0.1:7600",
    ),
]
Relay = Annotated[
    str | None,
    typer.Option(envvar="EBBTIDE_RELAY", help="Address of the weight-relay.", show_default="127.0.0.1:7610"),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(envvar="EBBTIDE_TOKEN_FILE", help="File that holds the cluster's token; or set EBBTIDE_TOKEN."),
]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run.")]


def with_client(
    ask: "Callable[[Client], Awaitable[T]]",
    coordinator: str | None,
    token_file: Path | None,
    patience_s: float = _PATIENCE_S,
    relay: str | None = None,
) -> T:
    """What `ask` returns. Raises its errors, and `InvalidRequest` for a token file that cannot be read."""
    token = _token(token_file)

    async def ask_it() -> T:
        from ebbtide.client import Client

        async with Client(coordinator, relay, token=token, patience_s=patience_s) as client:
            return await ask(client)

    return asyncio.run(ask_it())


def _token(file: Path | None) -> str | None:
    from ebbtide.errors import InvalidRequest

    try:
        return None if file is None else file.read_text(errors="replace").strip()
    except OSError as error:
        raise InvalidRequest(f"{str(file)!r} cannot be read ({error.strerror})", field="--token-file") from None
