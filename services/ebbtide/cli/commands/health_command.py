"""`ebbtide health`, also as `python -m ebbtide.cli.commands.health_command`: does a server serve? For health checks of
supervisors.

It needs what every service needs, and not the rest of the command line, so that images of one service have it too.
"""

import asyncio
import sys
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from ebbtide.auth.security import ClientSecurity
from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.settings import load


class HealthSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    address: Annotated[str, Meta(description="of a coordinator or weight-relay, host:port")]
    timeout_s: Annotated[float, Meta(gt=0, description="seconds that the answer may take")] = 3.0
    security: ClientSecurity = ClientSecurity()


def main(argv: Sequence[str] | None = None) -> None:
    """Ask a coordinator or weight-relay whether it serves. Exit status: 0 it does, 1 it does not, 2 bad settings."""
    settings = load(HealthSettings, prog="ebbtide health", argv=argv, description=main.__doc__ or "")
    try:
        asyncio.run(_ask(settings))
    except EbbtideError as error:
        print(f"ebbtide health: {error}", file=sys.stderr)  # noqa: T201 - this is a command
        sys.exit(2 if isinstance(error, InvalidRequest) else 1)


async def _ask(settings: HealthSettings) -> None:
    from ebbtide.rpc.health_check import check_serving

    await check_serving(settings.address, settings.security, timeout_s=settings.timeout_s)


if __name__ == "__main__":
    main()
