"""What finished rollouts leave behind: bytes of the coordinator and of Redis, with nothing live.

Half of the rollouts are acknowledged; the others' episodes become trajectories, which are committed.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from benchmarks.control_plane.driver import Driver
from benchmarks.scale.plan import ScalePlan
from benchmarks.scale.town import Town
from ebbtide.types.tokens import pack_ids
from ebbtide.v1 import rollouts_pb2
from tests.support.redis_servers import EmbeddedRedis
from tests.support.waiting import wait_until

#: Points over the last half of all rollouts.
_POINTS: Final = 5
#: Few rollouts live at once, so that what they need does not show.
_WORKERS, _SLOTS, _RUNS = 8, 128, 2
_LENGTHS: Final = (2, 6)
#: Tokens/s: all tokens of a rollout are there at its first message.
_RATE: Final = 1e7
_PER_CALL: Final = 256
_PATIENCE_S: Final = 7200.0
#: Of Redis' memory, what its connections and its file use for a moment.
_PASSING: Final = ("mem_clients_normal", "mem_aof_buffer")


class FinishingDriver(Driver):
    """Ends all that is finished, half of it through trajectories."""

    ended = completed = committed = 0

    async def start(self) -> None:
        await super().start()
        self._tasks.append(asyncio.create_task(self._commit()))

    @property
    def settled(self) -> bool:
        """Nothing is queued, runs, or waits to be counted and deleted."""
        self.check()
        return not self.unfinished and self.ended == self.finished and self.committed == self.completed

    async def _end(self, rollout_ids: list[str]) -> None:
        half = len(rollout_ids) // 2
        await super()._end(rollout_ids[:half])
        for at in range(half, len(rollout_ids), _PER_CALL):
            episodes = [_episode(rollout_id) for rollout_id in rollout_ids[at : at + _PER_CALL]]
            request = rollouts_pb2.CompleteEpisodesRequest(lease=self._lease, episodes=episodes)
            await self._peer.call(self._rollouts.CompleteEpisodes, request)
            self.completed += len(episodes)
        self.ended += len(rollout_ids)

    async def _commit(self) -> None:
        request = rollouts_pb2.WatchTrajectoriesRequest(run_id=self.run_id)
        waiting: list[str] = []
        async for one in self._peer.follow(lambda: self._rollouts.WatchTrajectories(request)):
            request.cursor = one.cursor
            waiting.append(one.cursor)
            if len(waiting) < _PER_CALL and self.committed + len(waiting) < self.completed:
                continue
            outcomes = [rollouts_pb2.TrajectoryOutcome(cursor=cursor) for cursor in waiting]
            commit = rollouts_pb2.CommitTrajectoriesRequest(lease=self._lease, outcomes=outcomes)
            await self._peer.call(self._rollouts.CommitTrajectories, commit)
            self.committed += len(waiting)
            waiting.clear()


def _episode(rollout_id: str) -> rollouts_pb2.Episode:
    name = rollout_id.partition(".")[0]
    trajectory = rollouts_pb2.Trajectory(
        episode_id=name, group_id="g", step=1, group_size=1, prompt_ids=pack_ids([1]), reward=1.0, rollouts=1
    )
    return rollouts_pb2.Episode(episode_id=name, rollout_ids=[rollout_id], trajectory=trajectory)


async def grow(town: Town, plan: ScalePlan, tell: Callable[[str], None]) -> dict[str, Any]:
    """Finish the plan's rollouts; bytes per rollout are the slope over the last half of them."""
    drivers = [town.driver(number, lengths=_LENGTHS, kind=FinishingDriver) for number in range(_RUNS)]
    try:
        for driver in drivers:
            await driver.start()
        await town.everywhere("pace", rate=_RATE)
        each, slots = _WORKERS // len(town.fleets), _slots(plan)
        await town.everywhere("arrive", workers=each, slots=slots, within_s=1.0)
        began = time.monotonic()
        points = []
        for share in (0.5 + 0.5 * number / (_POINTS - 1) for number in range(_POINTS)):
            await _finish(drivers, round(share * plan.finished), live=_WORKERS * slots)
            points.append(await _point(town, sum(driver.finished for driver in drivers)))
            tell(f"growth: {points[-1]}")
        seconds = time.monotonic() - began
    finally:
        await asyncio.gather(*(driver.close() for driver in drivers))
    count = [point["finished"] for point in points]
    return {
        "finished": count[-1],
        "finished_per_s": round(count[-1] / seconds),
        "store_bytes_per_finished": round(slope(count, [point["store_bytes"] for point in points]), 2),
        "coordinator_bytes_per_finished": round(slope(count, [point["coordinator_bytes"] for point in points]), 2),
        "growth_points": points,
        "growth_tokens_lost": sum(driver.lost_tokens for driver in drivers),
    }


def _slots(plan: ScalePlan) -> int:
    """Of each worker: few beside the rollouts between two points."""
    return max(2, min(_SLOTS, plan.finished // 20 // _WORKERS))


async def _finish(drivers: Sequence[FinishingDriver], count: int, *, live: int) -> None:
    """Until about so many rollouts in all have finished, and nothing is live."""
    for driver in drivers:
        driver.want(live // len(drivers))

    def enough() -> bool:
        for driver in drivers:
            driver.check()
        return sum(driver.finished for driver in drivers) >= count - live

    await wait_until(enough, _PATIENCE_S, interval=0.05, what="finished rollouts")
    for driver in drivers:
        driver.want(0)
    await wait_until(lambda: all(driver.settled for driver in drivers), 60, interval=0.05, what="nothing live")


async def _point(town: Town, finished: int) -> dict[str, int]:
    found = await town.ask("memory")
    return {"finished": finished, "store_bytes": store_bytes(town.redis), "coordinator_bytes": found["bytes"]}


def store_bytes(server: EmbeddedRedis) -> int:
    """What the data of a Redis uses, once it has given back what it can."""
    server.command("MEMORY", "PURGE")
    return int(server.info("used_memory")) - sum(int(server.info(name)) for name in _PASSING)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """By which `y` grows for each 1 of `x`: least squares."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((one - mean_x) ** 2 for one in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
