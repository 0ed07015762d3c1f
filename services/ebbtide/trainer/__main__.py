"""Starts the trainer."""

import asyncio
import os
import sys
from collections.abc import Coroutine, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from ebbtide.errors import InvalidRequest
from ebbtide.runtime import Shutdown, race, run
from ebbtide.settings import load
from ebbtide.trainer.ranks.rank_launcher import RankLost, RankPlace, place_of
from ebbtide.trainer.settings import TrainerSettings, check_wandb

if TYPE_CHECKING:
    from ebbtide.client import Client, Lease
    from ebbtide.trainer.lending.shared_loan import LendingRanks, LoanFollower
    from ebbtide.trainer.lending.turn_loan import DeviceSeat
    from ebbtide.trainer.ranks.rank_group import RankGroup
    from ebbtide.trainer.ranks.rank_world import RankWorld


#: torch's settings of its allocator: the present name and the former one.
_ALLOCATOR: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def main(argv: Sequence[str] | None = None) -> None:
    """Train runs, one after another, and publish their policy versions."""
    argv = sys.argv[1:] if argv is None else argv
    settings = load(TrainerSettings, prog="ebbtide serve trainer", argv=argv, description=main.__doc__ or "")
    try:
        place = place_of(os.environ, settings.ranks)
        settings.check_device()
        check_wandb(settings.wandb_project)
    except InvalidRequest as error:
        raise SystemExit(f"ebbtide serve trainer: {error}") from None
    quiet = msgspec.structs.replace(settings, metrics_port=-1, ready_file="")  # rank 0 reports for all
    if place is None and settings.ranks > 1 and "WORLD_SIZE" not in os.environ:
        from ebbtide.trainer.ranks.rank_launcher import launch

        run(lambda shutdown: launch(settings, argv, shutdown), "trainer", quiet)
    run(lambda shutdown: serve(settings, shutdown, place), "trainer", quiet if place and place.rank else settings)


async def serve(settings: TrainerSettings, shutdown: Shutdown, place: RankPlace | None = None) -> None:
    """Trains as the only rank, or as the one at `place`."""
    from ebbtide.trainer.learning.torch_threads import limit_threads

    limit_threads(settings.threads)  # before anything imports torch
    _grow_segments(os.environ)

    from ebbtide.trainer.learning.local_learning import choose_device

    device = choose_device(settings.device)
    seat = _seat(settings)
    try:
        await (_work(settings, shutdown, None) if place is None else _together(settings, shutdown, place, device))
    finally:
        if seat is not None:
            seat.leave()


def _seat(settings: TrainerSettings) -> "DeviceSeat | None":
    """Each rank has one, if runs may take turns."""
    if not settings.turns:
        return None
    from ebbtide.trainer.lending.turn_loan import DeviceSeat

    return DeviceSeat(Path(settings.grant_dir))


def _grow_segments(environ: MutableMapping[str, str]) -> None:
    """Lets CUDA's allocator grow its segments, unless the user chose: micro-batches differ in size, and the holes that
    they leave in fixed ones are lost to the next. torch reads this when it is loaded."""
    if not any(name in environ for name in _ALLOCATOR):
        environ[_ALLOCATOR[0]] = "expandable_segments:True"


async def _together(settings: TrainerSettings, shutdown: Shutdown, place: RankPlace, device: str) -> None:
    from ebbtide.trainer.lending.shared_loan import LendingRanks, LoanFollower, tell_places
    from ebbtide.trainer.ranks.rank_faults import noting_faults
    from ebbtide.trainer.ranks.rank_group import RankGroup
    from ebbtide.trainer.ranks.rank_world import RankBoard, RankPulse, RankWorld

    world = await asyncio.to_thread(RankWorld, place, device)
    loop = asyncio.get_running_loop()

    def lost(error: RankLost) -> None:
        loop.call_soon_threadsafe(shutdown.fail, error)

    pulse = RankPulse(place.rank, place.size, timeout_s=settings.rank_timeout_s, lost=lost)
    board = RankBoard()
    leaders = await tell_places(board, place.rank, place.size, settings.grant_dir)
    if place.rank:
        lead = leaders.get(place.rank)
        loans = LoanFollower(Path(settings.grant_dir), board, place.rank, pids=lead.pids) if lead else None
        following = _follow(world, settings, shutdown, loans)
        await noting_faults(following, RankBoard())
    else:
        crew = await asyncio.to_thread(RankGroup, world)
        lending = LendingRanks(board, leaders) if leaders else None
        try:
            await _work(settings, shutdown, crew, lending)
        finally:
            pulse.stop()
            await asyncio.to_thread(crew.over)
    pulse.stop()


async def _follow(
    world: "RankWorld", settings: TrainerSettings, shutdown: Shutdown, loans: "LoanFollower | None"
) -> None:
    """Follows rank 0. `loans`: this rank speaks to its host's guard, too."""
    from ebbtide.trainer.ranks.rank_group import follow

    works = [follow(world, settings, shutdown)]
    if loans is not None:
        works.append(loans.run())
    await race(*works)


async def _work(
    settings: TrainerSettings,
    shutdown: Shutdown,
    crew: "RankGroup | None",
    lending: "LendingRanks | None" = None,
) -> None:
    from ebbtide import run_client
    from ebbtide.trainer.service import train

    def work(client: "Client", lease: "Lease") -> Coroutine[None, None, None]:
        training = train(client, lease, settings, crew, lending)
        if crew is None:
            return training

        from ebbtide.trainer.ranks.rank_faults import failing_together
        from ebbtide.trainer.ranks.rank_world import RankBoard

        return failing_together(training, lease, RankBoard())

    await run_client.serve(settings, shutdown, "trainer", work)


if __name__ == "__main__":
    main()
