"""Compares rules on two real engines: blocks of the same sessions, in turns, by medians of the ratios of a round."""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

import msgspec

from benchmarks.turn_routing.engines.engine_fleet import VOCABULARY, EngineFleet
from benchmarks.turn_routing.engines.engine_sessions import BlockFigures, BlockPlan, SessionBlock, TurnAsker
from benchmarks.turn_routing.engines.ruled_coordinator import OURS, RULES
from tests.chaos.cluster import Cluster

Tell = Callable[[str], None]
ROUNDS: Final = 6
QUICK_ROUNDS: Final = 1
#: Of the prompts whose reading is timed on idle engines: tokens, and how many of each.
_PROMPTS: Final = (64, 1_600)
_TIMED: Final = 5


async def measure_engines(seed: int, tell: Tell, *, quick: bool) -> dict[str, Any]:
    """Figures of all rules. `quick`: in one round of blocks, in some two minutes on two idle cores."""
    with tempfile.TemporaryDirectory(prefix="ebb-routed-") as directory:
        cluster = Cluster(Path(directory))
        cluster.patience_s = 300.0
        try:
            async with EngineFleet.running(cluster) as fleet:
                tell("two engines have their weights")
                asker = TurnAsker(fleet.lease)
                try:
                    return await _compared(fleet, asker, seed, QUICK_ROUNDS if quick else ROUNDS, tell)
                finally:
                    await asker.close()
        finally:
            await cluster.close()


async def _compared(fleet: EngineFleet, asker: TurnAsker, seed: int, rounds: int, tell: Tell) -> dict[str, Any]:
    warm = BlockPlan(seed=seed - 1, sessions=1)
    await SessionBlock(fleet, asker, warm, OURS).play()  # kernels are prepared, and speeds are learnt
    played: list[dict[str, BlockFigures]] = []
    for number in range(rounds):
        order = [*RULES[number % len(RULES) :], *RULES[: number % len(RULES)]]
        if number // len(RULES) % 2:
            order.reverse()
        blocks: dict[str, BlockFigures] = {}
        for rule in order:
            blocks[rule] = await SessionBlock(fleet, asker, BlockPlan(seed=seed + number), rule).play()
            tell(_row(blocks[rule]))
        played.append(blocks)
    learnt = await fleet.learnt_prefills()
    fleet.place_by("least_loaded")
    prefill = {"learnt_tokens_per_s": learnt, "alone_tokens_per_s": await _prefill_alone(asker, Random(seed))}
    return engine_figures(played) | {"prefill": prefill, "blocks": msgspec.to_builtins(played)}


def engine_figures(played: Sequence[dict[str, BlockFigures]]) -> dict[str, Any]:
    """Medians over rounds, of each rule and of the ratios of ours to the others'."""
    ours = [blocks[OURS] for blocks in played]
    found: dict[str, Any] = {}
    for rule in RULES:
        theirs = [blocks[rule] for blocks in played]
        found[rule] = {
            "hits": _median([one.hits for one in theirs]),
            "tokens_per_s": _median([one.tokens_per_s for one in theirs]),
            "session_s": _median([one.session_s for one in theirs]),
        }
        if rule != OURS:
            pairs = list(zip(ours, theirs, strict=True))
            found[f"over_{rule}"] = {
                "hits": _median([one.hits / other.hits for one, other in pairs]),
                "tokens_per_s": _median([one.tokens_per_s / other.tokens_per_s for one, other in pairs]),
                "session_s": _median([one.session_s / other.session_s for one, other in pairs]),
            }
    return found


async def _prefill_alone(asker: TurnAsker, random: Random) -> float:
    """What a token of a prompt more costs an engine without other work, as tokens/s: from prompts of two lengths."""
    times: dict[int, list[float]] = {length: [] for length in _PROMPTS}
    for number in range(_TIMED):
        for length in _PROMPTS:
            prompt = [random.randrange(1, VOCABULARY - 1) for _ in range(length)]
            began = time.monotonic()
            await asker.ask(f"alone-{length}-{number}", 0, prompt, 1)
            times[length].append(time.monotonic() - began)
    short, long = _PROMPTS
    return round((long - short) / (median(times[long]) - median(times[short])))


def _median(values: Sequence[float]) -> float:
    return round(median(values), 4)


def _row(one: BlockFigures) -> str:
    return (
        f"  {one.rule:<14} {one.tokens_per_s:7,.0f} tokens/s, hits {one.hits:.3f}, "
        f"sessions of {one.session_s:.2f} s, {one.turns} turns in {one.seconds:.0f} s"
    )
