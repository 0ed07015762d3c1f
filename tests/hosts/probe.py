"""`python -m tests.hosts.probe METHOD...` calls RPCs of the coordinator and of the relay, as whoever it is made by the
environment, and writes the status of each as one JSON object. The requests are empty: who is let in is told so."""

import asyncio
import json
import os
import sys
from typing import Any, Final

import grpc
import msgspec

from ebbtide.auth.security import ClientSecurity
from ebbtide.rpc.channel import open_channel

_TIMEOUT_S: Final = 10.0


def identity() -> ClientSecurity:
    given = {name: os.environ.get(f"EBBTIDE_{name.upper()}", "") for name in ClientSecurity.__struct_fields__}
    return msgspec.convert({name: value for name, value in given.items() if value}, ClientSecurity, strict=False)


async def status(method: str) -> str:
    where = os.environ["EBBTIDE_RELAY" if ".Weights/" in method else "EBBTIDE_COORDINATOR"]
    async with open_channel(where, identity()) as channel:
        # On the wire a stream of one message is a single message.
        call: Any = channel.stream_stream(method)(iter([b""]), timeout=_TIMEOUT_S)
        try:
            async for _ in call:
                break
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"


async def main(methods: list[str]) -> None:
    answers = {method: await status(method) for method in methods}
    print(json.dumps(answers))  # noqa: T201 - who started this reads it


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
