"""Starts the trainer."""

from collections.abc import Sequence

from ebbtide.runtime import Shutdown, run
from ebbtide.settings import load
from ebbtide.trainer.settings import TrainerSettings


def main(argv: Sequence[str] | None = None) -> None:
    """Train runs, one after another, and publish their policy's versions."""
    settings = load(TrainerSettings, prog="ebbtide trainer", argv=argv, description=main.__doc__ or "")
    run(lambda shutdown: serve(settings, shutdown), "trainer", settings)


async def serve(settings: TrainerSettings, shutdown: Shutdown) -> None:
    from ebbtide.trainer.threads import limit_threads

    limit_threads(settings.threads)  # before anything imports torch

    from ebbtide.trainer import work
    from ebbtide.trainer.learning import choose_device
    from ebbtide.trainer.service import train

    choose_device(settings.device)
    await work.serve(settings, shutdown, "trainer", lambda client, lease: train(client, lease, settings))


if __name__ == "__main__":
    main()
