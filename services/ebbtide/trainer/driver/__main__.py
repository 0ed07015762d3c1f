"""Starts the episode driver."""

from collections.abc import Sequence

from ebbtide.runtime import Shutdown, run
from ebbtide.settings import load
from ebbtide.trainer.driver.settings import DriverSettings


def main(argv: Sequence[str] | None = None) -> None:
    """Run the environments of runs, one run after another, and submit their rollouts."""
    settings = load(DriverSettings, prog="ebbtide driver", argv=argv, description=main.__doc__ or "")
    run(lambda shutdown: serve(settings, shutdown), "driver", settings)


async def serve(settings: DriverSettings, shutdown: Shutdown) -> None:
    from ebbtide.trainer import work
    from ebbtide.trainer.driver.service import drive

    await work.serve(settings, shutdown, "driver", lambda client, lease: drive(client, lease, settings))


if __name__ == "__main__":
    main()
