"""Measures what feeding siblings' tokens costs a real coordinator, with Redis and gRPC: with the feed and without."""

from collections.abc import Callable
from statistics import median
from typing import Any, Final

import uvloop

from benchmarks.control_plane.driver import Driver
from benchmarks.control_plane.house import House
from benchmarks.control_plane.level import ControlPlaneLevel, Load, Tell
from ebbtide.types.tail_spec import TailSpec

#: Each group of eight is on both workers. Of a vLLM engine at 64 rollouts each would be 50 tokens/s; with five times
#: that, what the coordinator does in idle seconds counts for less, and the feed for more.
_LOAD: Final = Load(workers=2, rollouts=64, rate=30_000.0)
#: Pairs of houses, with and without the feed in turns, and seconds that are measured in each.
_PAIRS, _SECONDS = 4, 20.0
_QUICK_PAIRS, _QUICK_SECONDS = 2, 8.0


class DraftingHouse(House):
    """The fleet's workers want siblings' tokens."""

    async def _start(self) -> None:
        await super()._start()
        self._fleet = await self._fleet_of("benchmarks.long_tail.feed.feed_fleet")


class FeedLevel(ControlPlaneLevel):
    """`tail`: of its run."""

    def __init__(self, load: Load, tell: Tell, tail: TailSpec) -> None:
        self._drafting = DraftingHouse()
        super().__init__(load, tell, self._drafting)
        self._tail = tail

    def _new_driver(self, spared: int) -> Driver:
        return Driver(self._drafting.address, self._drafting.token, spared=spared, tail=self._tail)

    async def measured(self, seconds: float) -> dict[str, float]:
        """CPU seconds of coordinator and Redis per million tokens, and tokens that each token was fed to."""
        async with self.filled():
            before = (await self._drafting.fleet("fed"))["fed"]
            seen = await self.window(seconds)
            fed = (await self._drafting.fleet("fed"))["fed"] - before
        return {
            "coordinator_cpu_s_per_mtok": seen["coordinator_cpu_s_per_mtok"],
            "redis_cpu_s_per_mtok": seen["redis_cpu_s_per_mtok"],
            "tokens_per_s": seen["tokens_per_s"],
            "fed_per_token": round(fed / (seen["tokens_per_s"] * seconds), 3),
            "messages_per_s": seen["messages_per_s"],
        }


def feed_part(tell: Callable[[str], None], *, quick: bool) -> dict[str, Any]:
    """The coordinator's CPU seconds per million tokens with the feed over those without: the median of pairs. Redis
    does the same work in both, so the ratio of its CPU shows how far other load on the machine differed between them.
    """
    pairs, seconds = (_QUICK_PAIRS, _QUICK_SECONDS) if quick else (_PAIRS, _SECONDS)
    found: list[dict[str, dict[str, float]]] = []
    for number in range(pairs):
        sides = ("off", "grouped") if number % 2 else ("grouped", "off")
        pair = {side: uvloop.run(FeedLevel(_LOAD, lambda _: None, _tail(side)).measured(seconds)) for side in sides}
        found.append(pair)
        tell(f"feed: {_ratio(pair):.3f} of the coordinator's CPU per token without it: {pair}")
    ratios = [_ratio(pair) for pair in found]
    return {
        "figures": {},
        "cpu_over_without": median(ratios),
        "redis_cpu_over_without": median([_ratio(pair, "redis_cpu_s_per_mtok") for pair in found]),
        "load": {"workers": _LOAD.workers, "rollouts": _LOAD.rollouts, "tokens_per_s": _LOAD.rate, "group": 8},
        "ratios": ratios,
        "pairs": found,
    }


def _tail(side: str) -> TailSpec:
    return TailSpec(speculation="grouped") if side == "grouped" else TailSpec()


def _ratio(pair: dict[str, dict[str, float]], name: str = "coordinator_cpu_s_per_mtok") -> float:
    return pair["grouped"][name] / pair["off"][name]
