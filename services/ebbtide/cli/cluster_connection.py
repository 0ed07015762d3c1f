"""Connects commands to a cluster: shared options, a client, and the choice between one look, JSON and watching."""

import asyncio
import math
import os
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from ebbtide.cli.waiting import Waiting
from ebbtide.errors import InvalidRequest, Unauthenticated, Unavailable

if TYPE_CHECKING:
    from ebbtide.client import Client


T = TypeVar("T")

#: A person waits for the answer, so an unreachable service is reported soon. Watchers wait longer for a known one.
_REACH_S: Final = 4.0
_PATIENCE_S: Final = 5.0
WATCH_PATIENCE_S: Final = 60.0
_SOURCE: Final = "`source runs/up/env`"

Coordinator = Annotated[
    str | None,
    typer.Option(
        envvar="EBBTIDE_COORDINATOR",
        help="Address of the coordinator; separate several by commas.",
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
        help="File that holds the cluster's token; EBBTIDE_TOKEN may hold it instead.",
    ),
]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")]
Every = Annotated[float, typer.Option(min=0.1, help="With --watch: refresh interval in seconds.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def with_client(
    ask: "Callable[[Client], Awaitable[T]]",
    coordinator: str | None,
    token_file: Path | None,
    *,
    relay: str | None = None,
    of_relay: bool = False,
    watches: bool = False,
) -> T:
    """Returns what `ask` returns. Raises its errors, `InvalidRequest` for an unreadable token file, and `Unavailable`
    soon if nobody is there.

    `of_relay`: `ask` is for the relay, and not for the coordinator. `watches`: it tells what it waits for by itself,
    and a service that was there may be away for a while.
    """
    token = _read(token_file)

    async def ask_it() -> T:
        from ebbtide.client import Client

        patience_s = WATCH_PATIENCE_S if watches else _PATIENCE_S
        async with Client(coordinator, relay, token=token, patience_s=patience_s) as client:
            with Waiting(relay_of(client) if of_relay else coordinator_of(client)):
                await _reach(client, of_relay=of_relay)
                if not watches:
                    return await ask(client)
            return await ask(client)

    with token_explained():
        return asyncio.run(ask_it())


async def durably(client: "Client", answer: Awaitable[T]) -> T:
    """Returns an answer that comes once its writes are durable, which takes long on some stores."""
    with Waiting(f"{coordinator_of(client)} to make it durable (half a minute if Redis has no append-only file)"):
        return await answer


def coordinator_of(client: "Client") -> str:
    """What is waited for."""
    return f"the coordinator at {client.coordinator}"


def relay_of(client: "Client") -> str:
    """What is waited for."""
    return f"the weight-relay at {client.relay}"


async def _reach(client: "Client", *, of_relay: bool) -> None:
    try:
        await client.reach(_REACH_S, relay=of_relay)
    except Unavailable as error:
        option = "--relay" if of_relay else "--coordinator"
        told = str(error) if str(error).endswith("?") else f"{error}."
        remedy = f"start one with `ebbtide up`, or name another by {_SOURCE} or {option}"
        raise Unavailable(f"{told} If there is no cluster, {remedy}") from None


@contextmanager
def token_explained() -> Iterator[None]:
    """Adds where a local cluster's token is to the errors of a missing and of a wrong one."""
    try:
        yield
    except Unauthenticated as error:
        raise Unauthenticated(f"{error}; of a cluster of `ebbtide up`: {_SOURCE}") from None
    except InvalidRequest as error:
        if error.field != "token":
            raise
        raise InvalidRequest(f"{error.text}; of a cluster of `ebbtide up`: {_SOURCE}", field="token") from None


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


_UNITS: Final = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_FORM: Final = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*)", re.ASCII)


def seconds(text: str, *, field: str) -> float:
    """Returns `30`, `30s`, `1.5m`, `500ms` or `1h` in seconds. Raises `InvalidRequest` naming `field`."""
    match = _FORM.fullmatch(text.strip().lower())
    unit = _UNITS.get(match[2]) if match else None
    if match is None or unit is None:
        raise InvalidRequest(f"{text!r} is no duration: write 30, 30s, 2m or 1h", field=field)
    value = float(match[1]) * unit
    if not 0 < value < math.inf:
        raise InvalidRequest(f"{text!r} leaves no time: give at least a second, such as 30s", field=field)
    return value
