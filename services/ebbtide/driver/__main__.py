"""Starts the episode driver."""

from collections.abc import Sequence

from ebbtide.driver.settings import DriverSettings
from ebbtide.runtime import Shutdown, hide_memory, run
from ebbtide.settings import load


def main(argv: Sequence[str] | None = None) -> None:
    """Run the environments of runs, one run after another, and submit their rollouts."""
    settings = load(DriverSettings, prog="ebbtide serve driver", argv=argv, description=main.__doc__ or "")
    run(lambda shutdown: serve(settings, shutdown), "driver", settings)


async def serve(settings: DriverSettings, shutdown: Shutdown) -> None:
    from ebbtide import run_client
    from ebbtide.driver.service import drive

    hide_memory()  # environment code may run as this user, if `environments.trust` says so
    await run_client.serve(settings, shutdown, "driver", lambda client, lease: drive(client, lease, settings))


if __name__ == "__main__":
    main()
