"""Plays steps with moves and without in turn (on, off, off, on, ...), and compares their times and their tokens."""

import tempfile
import time
from asyncio import TaskGroup, to_thread
from collections.abc import Callable, Sequence
from contextlib import aclosing
from math import exp
from pathlib import Path
from random import Random
from statistics import NormalDist, median
from typing import Any, Final

import msgspec
from msgspec import Struct

from benchmarks.live_moves.moved_fleet import FIRST, RUN, SLOTS, MovedFleet
from benchmarks.real_time import above_the_measured, real_time
from ebbtide.demo.foreign_load import cores, share_of_others
from ebbtide.types.rollout import RolloutRequest
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import pack_ids, unpack_tokens
from tests.chaos.cluster import Cluster
from tests.support.waiting import wait_until

#: The store lies in memory where that can be: the kernel's threads that sync a disk are below the engines, which take
#: both cores, and a late sync would hold generation.
_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - the folder below it is this user's alone
Tell = Callable[[str], None]
PAIRS: Final = 3
QUICK_PAIRS: Final = 1
#: Both workers are there from the beginning; or the second one joins when the first has made a part of the tokens.
STEADY: Final = "steady"
LATE: Final = "late"
SCENARIOS: Final = (STEADY, LATE)
_JOINS_AT: Final = 0.25
#: Response lengths are log-normal, with a few that end at the bound: median, spread, and bounds.
_MEDIAN: Final = 800.0
_SIGMA: Final = 1.2
_BOUNDS: Final = (32, 3000)
_BLOCK_S: Final = 600.0


class StepPlan(Struct, frozen=True, kw_only=True):
    """One block. Blocks of one seed have the same prompts and lengths."""

    name: str
    seed: int
    scenario: str = STEADY
    moves: bool = False
    rollouts: int = SLOTS

    def requests(self) -> list[RolloutRequest]:
        random = Random(self.seed)
        normal = NormalDist()
        drawn = [normal.inv_cdf((number + 0.5) / self.rollouts) for number in range(self.rollouts)]
        random.shuffle(drawn)  # the lengths are the same for each seed, in another order
        return [self._request(number, z, random) for number, z in enumerate(drawn)]

    def _request(self, number: int, z: float, random: Random) -> RolloutRequest:
        least, most = _BOUNDS
        length = round(min(most, max(least, _MEDIAN * exp(_SIGMA * z))))
        prompt = [10 + number, *(random.randrange(1, 100) for _ in range(random.randrange(16, 64)))]
        return RolloutRequest(
            rollout_id=f"{self.name}-{number}",
            group_id=f"{self.name}-{number}",
            episode_id=f"{self.name}-{number}",
            prompt_ids=pack_ids(prompt),
            sampling=Sampling(temperature=0.0, max_tokens=length, ignore_eos=True),
        )


class StepFigures(Struct, frozen=True, kw_only=True):
    scenario: str
    moves: bool
    seconds: float  # from the submit until the last rollout has finished
    joined_s: float | None  # when the second worker could get work, if it joined
    tokens: int  # of the responses
    moved: int  # attempts that were moved, by the coordinator's count
    resumed_midway: int
    tokens_twice: int  # by the workers' own ledgers, beyond those of the responses
    made_by_second: float  # its share of the tokens
    foreign_load: float  # share of the cores that other programs took

    @property
    def speed(self) -> float:
        """Tokens/s."""
        return self.tokens / self.seconds


Responses = dict[int, list[int]]


async def measure_moves(
    seed: int, scenarios: Sequence[str], pairs: int, tell: Tell, directory: Path | None = None
) -> dict[str, Any]:
    """Figures of each scenario, and all blocks. Logs stay in `directory`, if one is given."""
    folder = _MEMORY if _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="ebb-moves-", dir=folder) as temporary, real_time() as permitted:
        above_the_measured()
        cluster = Cluster(directory or Path(temporary))
        cluster.patience_s = 300.0
        try:
            async with MovedFleet.running(cluster) as fleet:
                trials = MoveTrials(fleet, seed, tell)
                await trials.warm()
                for scenario in scenarios:
                    for number in range(pairs):
                        await trials.pair(scenario, number)
                blocks = msgspec.to_builtins(trials.pairs)
                return {"figures": trials.figures(), "blocks": blocks, "real_time": permitted}
        finally:
            await cluster.close()


class MoveTrials:
    """`pairs`: by scenario, (with moves, without)."""

    def __init__(self, fleet: MovedFleet, seed: int, tell: Tell) -> None:
        self._fleet, self._seed, self._tell = fleet, seed, tell
        self.pairs: dict[str, list[tuple[StepFigures, StepFigures]]] = {}
        self._unequal: dict[str, int] = dict.fromkeys(SCENARIOS, 0)
        self._attached = False  # whether a second worker is

    async def warm(self) -> None:
        """Have the first worker's kernels prepared, and its speed and the lengths learnt."""
        await self._play(StepPlan(name="warm", seed=self._seed - 1))

    async def pair(self, scenario: str, number: int) -> None:
        played: dict[bool, tuple[StepFigures, Responses]] = {}
        for moves in (True, False) if number % 2 == 0 else (False, True):
            await self._arrange(scenario, number)
            name = f"{scenario}-{number}-{'on' if moves else 'off'}"
            plan = StepPlan(name=name, seed=self._seed + number, scenario=scenario, moves=moves)
            played[moves] = await self._play(plan)
            self._tell(_row(played[moves][0]))
        (with_moves, made), (without, reference) = played[True], played[False]
        self.pairs.setdefault(scenario, []).append((with_moves, without))
        self._unequal[scenario] += sum(made[one] != reference[one] for one in reference)

    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for scenario, pairs in self.pairs.items():
            ratios = [round(on.speed / off.speed, 4) for on, off in pairs]
            found[f"{scenario}_speed_ratio"] = median(ratios)
            found[f"{scenario}_speed_ratios"] = ratios
        blocks = [block for pairs in self.pairs.values() for pair in pairs for block in pair]
        return found | {
            "moves": {scenario: [on.moved for on, _ in pairs] for scenario, pairs in self.pairs.items()},
            "moves_while_off": sum(block.moved for block in blocks if not block.moves),
            "unequal_responses": sum(self._unequal.values()),
            "tokens_twice": sum(block.tokens_twice for block in blocks),
        }

    async def _arrange(self, scenario: str, number: int) -> None:
        """Bring the fleet to its state at a block's beginning."""
        fleet = self._fleet
        if scenario == STEADY and self._attached:
            return
        if self._attached:
            await fleet.leave()
        await fleet.prepare()
        self._attached = True
        if scenario == STEADY:
            await fleet.join()
            await self._play(StepPlan(name=f"warm-{fleet.second}", seed=self._seed - 2 - number))

    async def _play(self, plan: StepPlan) -> tuple[StepFigures, Responses]:
        fleet, requests = self._fleet, plan.requests()
        tokens = sum(one.sampling.max_tokens for one in requests)
        fleet.switch_moves(on=plan.moves)
        before, use, began = await self._counts(), cores(), time.monotonic()
        joined_s: float | None = None
        async with TaskGroup() as group:
            reading = group.create_task(self._responses(plan, began))
            await fleet.lease.submit_rollouts(requests)
            if plan.scenario == LATE:
                await wait_until(
                    lambda: self._made(plan, FIRST) >= _JOINS_AT * tokens, _BLOCK_S, interval=0.1, what="a part"
                )
                await fleet.join()
                joined_s = round(time.monotonic() - began, 2)
        responses, seconds = reading.result()
        others = share_of_others(use, cores())
        after = await self._counts()
        made = await to_thread(self._made, plan)
        figures = StepFigures(
            scenario=plan.scenario,
            moves=plan.moves,
            seconds=round(seconds, 3),
            joined_s=joined_s,
            tokens=tokens,
            moved=after.get("moved", 0) - before.get("moved", 0),
            resumed_midway=after.get("resumed_midway", 0) - before.get("resumed_midway", 0),
            tokens_twice=made - sum(map(len, responses.values())),
            made_by_second=round(1.0 - self._made(plan, FIRST) / made, 3),
            foreign_load=round(others, 3),
        )
        return figures, responses

    async def _responses(self, plan: StepPlan, began: float) -> tuple[Responses, float]:
        """All responses of the block by their number, and the seconds until the last was there."""
        found: Responses = {}
        async with aclosing(self._fleet.lease.finished()) as finishes:
            async for finish in finishes:
                block, _, number = finish.rollout_id.rpartition("-")
                if block == plan.name:
                    found[int(number)] = unpack_tokens(finish.tokens)["id"].tolist()
                if len(found) == plan.rollouts:
                    break
        seconds = time.monotonic() - began
        await self._fleet.lease.acknowledge([f"{plan.name}-{number}" for number in found])
        return found, seconds

    def _made(self, plan: StepPlan, *workers: str) -> int:
        """Tokens of the block that left these workers' engines, or all."""
        records = self._fleet.cluster.ledger(*workers)
        return sum(one.generated for one in records if one.rollout_id.startswith(f"{plan.name}-"))

    async def _counts(self) -> dict[str, int]:
        return dict((await self._fleet.client.run(RUN)).counters)


def _row(one: StepFigures) -> str:
    joined = "" if one.joined_s is None else f", joined after {one.joined_s:.1f} s"
    return (
        f"  {one.scenario:<7} moves {'on' if one.moves else 'off':<4} {one.seconds:6.1f} s {one.speed:7,.0f} tokens/s, "
        f"{one.moved:2} moves, {one.resumed_midway:2} resumed midway, {one.tokens_twice} tokens twice, "
        f"second made {one.made_by_second:.0%}{joined}; others took {one.foreign_load:.0%} of the cores"
    )
