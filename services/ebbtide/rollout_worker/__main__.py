"""Runs `ebbtide rollout-worker`, also as `python -m ebbtide.rollout_worker`."""

from ebbtide.rollout_worker.settings import WorkerSettings
from ebbtide.runtime import Shutdown, run
from ebbtide.settings import load


def main(argv: list[str] | None = None) -> None:
    """Run a worker until a signal ends it."""
    settings = load(
        WorkerSettings,
        prog="ebbtide rollout-worker",
        argv=argv,
        description="Generates rollouts on one engine for a coordinator.",
    )

    async def serve(shutdown: Shutdown) -> None:
        from ebbtide.rollout_worker.service import serve as work

        await work(shutdown, settings)

    run(serve, "rollout-worker", settings)


if __name__ == "__main__":
    main()
