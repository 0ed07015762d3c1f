"""Starts the device-arbiter."""

from collections.abc import Sequence

from ebbtide.device_arbiter.settings import ArbiterSettings
from ebbtide.runtime import Shutdown, run
from ebbtide.settings import load


def main(argv: Sequence[str] | None = None) -> None:
    """Lend a trainer's device to the workers beside it between the trainer's steps."""
    settings = load(ArbiterSettings, prog="ebbtide device-arbiter", argv=argv, description=main.__doc__ or "")

    async def arbitrate(shutdown: Shutdown) -> None:
        from ebbtide.device_arbiter.service import serve

        await serve(shutdown, settings)

    run(arbitrate, "device-arbiter", settings)


if __name__ == "__main__":
    main()
