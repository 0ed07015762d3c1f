"""The first words with a server: who it is, and whether it may be used at all."""

import asyncio
from typing import Final

import redis.exceptions
from redis.asyncio.connection import AbstractConnection

#: A server that takes longer to say who it is is frozen, or not there.
_GREETING_S: Final = 5.0


async def greet(link: AbstractConnection) -> str:
    """Ask a server just dialled which life of the store it is: this process of it, with the history of its data.

    A restart gives another one, and so does the promotion of a replica; a broken link to the same server does not. (A
    primary's first replica gives another one, too, though nothing was lost: that costs some repeats.) Raises redis'
    errors for a server that is still loading, or is a replica; `TimeoutError`.
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
    """What `INFO` says, by name."""
    lines = (line.partition(":") for line in text.decode().splitlines() if ":" in line)
    return {name: value for name, _, value in lines}
