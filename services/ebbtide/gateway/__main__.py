"""Starts the gateway."""

import sys
from collections.abc import Sequence

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.freed_memory import return_freed_memory
from ebbtide.gateway.settings import GatewaySettings
from ebbtide.runtime import Shutdown, run
from ebbtide.settings import load


def main(argv: Sequence[str] | None = None) -> None:
    """Serve runs' policies over HTTP, to clients of OpenAI's, Anthropic's, vLLM's and SGLang's routes."""
    settings = load(GatewaySettings, prog="ebbtide gateway", argv=argv, description=main.__doc__ or "")
    try:
        settings.checked()
    except InvalidRequest as error:
        print(f"ebbtide gateway: {error}", file=sys.stderr)  # noqa: T201 - before there are logs
        raise SystemExit(2) from None

    async def gateway(shutdown: Shutdown) -> None:
        from ebbtide.gateway.service import serve

        await serve(shutdown, settings)

    return_freed_memory()
    run(gateway, "gateway", settings)


if __name__ == "__main__":
    main()
