"""Fails a run on all ranks when one of them runs out of memory.

The others then wait in a collective for a rank that will not come, and answer nothing. So the rank leaves a note, and
ends. Rank 0 finds it, whether its own collective has failed or waits, tells the coordinator, and ends: the ranks are
out of step, and the next trainer finds a run that has failed.
"""

import asyncio
from collections.abc import Awaitable
from typing import Final

from ebbtide.client import Lease
from ebbtide.errors import Internal, Unavailable
from ebbtide.runtime import race
from ebbtide.telemetry import get_logger
from ebbtide.trainer.learning.out_of_memory import OutOfMemory
from ebbtide.trainer.ranks.rank_launcher import RankLost
from ebbtide.trainer.ranks.rank_world import RankBoard
from ebbtide.types.run import RunStatus

log = get_logger(__name__)

NOTE: Final = "ebbtide/out_of_memory"
#: How long one look for the note lasts.
_LOOK_S: Final = 30.0
#: How much later a rank's note may come than the failure of the version that it publishes: its client closes first.
_LATE_S: Final = 15.0


async def noting_faults(work: Awaitable[None], board: RankBoard) -> None:
    """Does a rank's work, other than rank 0's. Raises `RankLost` if it ran out of memory, with a note for rank 0."""
    try:
        await work
    except OutOfMemory as error:
        await board.put(NOTE, str(error).encode())
        raise RankLost(f"all ranks end: {error}") from None


async def failing_together(training: Awaitable[None], lease: Lease, board: RankBoard) -> None:
    """Does rank 0's work on the lease's run. Fails the run and raises `RankLost` if any rank ran out of memory."""
    try:
        await race(training, _noted(board))
    except OutOfMemory as error:
        reason = str(error)
    except RankLost:  # perhaps because the other rank ended that had left the note
        if (note := (await board.find([NOTE])).get(NOTE)) is None:
            raise
        reason = note.decode(errors="replace")
    except Internal:  # perhaps of a version that another rank had no memory for, which leaves its note as it ends
        if (note := await board.await_one(NOTE, _LATE_S)) is None:
            raise
        reason = note.decode(errors="replace")
    else:
        return
    log.error("the run failed", reason=reason)
    await lease.finish(RunStatus.FAILED, reason)
    raise RankLost("all ranks end, as they are out of step since one ran out of memory")


async def _noted(board: RankBoard) -> None:
    """Waits for the note. Raises `OutOfMemory` with its text."""
    while True:
        try:
            note = await board.await_one(NOTE, _LOOK_S)
        except Unavailable:  # the pulse of the ranks notices, and ends them
            await asyncio.Event().wait()
            return
        if note is not None:
            raise OutOfMemory(note.decode(errors="replace"))
