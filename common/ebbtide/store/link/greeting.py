"""Learns a server's incarnation after dialling it, and refuses servers that cannot be used."""

import asyncio
from typing import Final

import redis.exceptions
from redis.asyncio.connection import AbstractConnection

#: A server that takes longer is frozen or gone.
_GREETING_S: Final = 5.0


async def greet(link: AbstractConnection) -> str:
    """Ask a dialled server for the store's incarnation, which names its process and the history of its data.

    A restart or the promotion of a replica makes a new incarnation; a broken link does not. (A primary's first replica
    makes one, too, though nothing is lost: this costs some repeats.) Raises redis' errors for a server that is loading
    or a replica; `TimeoutError`.
    """
    async with asyncio.timeout(_GREETING_S):
        await link.send_command("INFO")
        said = info(await link.read_response())
    if said.get("loading", "0") != "0":
        raise redis.exceptions.BusyLoadingError("loading the dataset")
    if said.get("role", "master") != "master":
        raise redis.exceptions.ReadOnlyError("its role is that of a replica")
    return f"{said.get('run_id', '')}.{said.get('master_replid', '')}"


def info(text: bytes) -> dict[str, str]:
    """The values of `INFO`, by name."""
    lines = (line.partition(":") for line in text.decode().splitlines() if ":" in line)
    return {name: value for name, _, value in lines}
