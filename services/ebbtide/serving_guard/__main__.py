"""Starts the serving-guard."""

import sys
from collections.abc import Sequence

from ebbtide.errors import InvalidRequest
from ebbtide.runtime import Shutdown, run
from ebbtide.serving_guard.settings import GuardSettings
from ebbtide.settings import load


def main(argv: Sequence[str] | None = None) -> None:
    """Lend a device to the workers beside it: a serving engine's within its SLO, or a trainer's between its steps."""
    settings = load(GuardSettings, prog="ebbtide serve serving-guard", argv=argv, description=main.__doc__ or "")
    try:
        settings.checked()
    except InvalidRequest as error:
        print(f"ebbtide serve serving-guard: {error}", file=sys.stderr)  # noqa: T201 - before there are logs
        raise SystemExit(2) from None

    async def guard(shutdown: Shutdown) -> None:
        from ebbtide.serving_guard.service import serve

        await serve(shutdown, settings)

    run(guard, "serving-guard", settings)


if __name__ == "__main__":
    main()
