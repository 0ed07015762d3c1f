"""Runs `ebbtide serve rollout-worker`, also as `python -m ebbtide.rollout_worker`."""

import gc

from ebbtide.rollout_worker.settings import WorkerSettings
from ebbtide.runtime import Shutdown, run
from ebbtide.settings import load


def main(argv: list[str] | None = None) -> None:
    """Run a worker until a signal ends it."""
    settings = load(
        WorkerSettings,
        prog="ebbtide serve rollout-worker",
        argv=argv,
        description="Generate rollouts on one engine for a coordinator.",
    )

    async def serve(shutdown: Shutdown) -> None:
        from ebbtide.rollout_worker.service import serve as work

        await work(shutdown, settings, booted=_set_aside)

    run(serve, "rollout-worker", settings)


def _set_aside() -> None:
    """Keep what was imported and made at boot out of later garbage collections: with vLLM and torch these are so many
    objects that walking them stops all tokens for a while. Only for a worker that has a process of its own."""
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main()
