"""Runs `ebbtide health`, with which supervisors check a server.

`python -m ebbtide.cli.health` imports only what every service needs, so that the image of a single service has it too.
"""

import asyncio
import sys
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from ebbtide.auth.security import ClientSecurity
from ebbtide.cli.waiting import Waiting
from ebbtide.errors import EbbtideError, InvalidRequest, Unauthenticated
from ebbtide.settings import load


class HealthSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    address: Annotated[str, Meta(description="address of a coordinator or weight-relay, host:port")]
    timeout_s: Annotated[float, Meta(gt=0, description="seconds to wait for the answer")] = 3.0
    security: ClientSecurity = ClientSecurity()


def main(argv: Sequence[str] | None = None) -> None:
    """Check whether a coordinator or weight-relay serves. Exit status: 0 it serves, 1 it does not, 2 bad settings."""
    settings = load(HealthSettings, prog="ebbtide health", argv=argv, description=main.__doc__ or "")
    try:
        with Waiting(f"the server at {settings.address}"):
            asyncio.run(_ask(settings))
    except EbbtideError as error:
        print(f"ebbtide health: {error}", file=sys.stderr)  # noqa: T201 - this is a command
        sys.exit(2 if isinstance(error, InvalidRequest | Unauthenticated) else 1)


async def _ask(settings: HealthSettings) -> None:
    from ebbtide.rpc.channel import check_serving

    await check_serving(settings.address, settings.security, timeout_s=settings.timeout_s)


if __name__ == "__main__":
    main()
