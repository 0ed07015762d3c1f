"""Starts the gateway."""

import ctypes
import sys
from collections.abc import Sequence
from typing import Final

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.settings import GatewaySettings
from ebbtide.runtime import Shutdown, run
from ebbtide.settings import load

#: From glibc's malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_ARENA_MAX: Final = -8
#: Free bytes at the heap's end that are kept.
_KEPT: Final = 1 << 20


def return_freed_memory() -> None:
    """Has this process use one heap, and return to the system what requests no longer need.

    Large bodies come and go in several threads. By its defaults the C library keeps a heap for each thread, and a part
    of what was freed in each: under clients that sent giant bodies a gateway grew to twice its size, and stayed there.
    Must come before threads are started; C libraries without it need nothing.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 1)
        # This also ends the growth of the size from which an allocation is a mapping of its own.
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve runs' policies over HTTP, to clients of OpenAI's, Anthropic's, vLLM's and SGLang's routes."""
    settings = load(GatewaySettings, prog="ebbtide serve gateway", argv=argv, description=main.__doc__ or "")
    try:
        settings.checked()
    except InvalidRequest as error:
        print(f"ebbtide serve gateway: {error}", file=sys.stderr)  # noqa: T201 - before there are logs
        raise SystemExit(2) from None

    async def gateway(shutdown: Shutdown) -> None:
        from ebbtide.gateway.service import serve

        await serve(shutdown, settings)

    return_freed_memory()
    run(gateway, "gateway", settings)


if __name__ == "__main__":
    main()
