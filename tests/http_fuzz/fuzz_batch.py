"""Runs cases in this process, several at once, and sums up."""

import asyncio
import resource
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import uvloop
from msgspec import Struct, field

from tests.http_fuzz.http_case import CaseResult, fuzz_stand

#: Pairs of proxy and engine that work at once in a process, so that time limits of some cases hold up no others.
_STANDS: Final = 4


class FuzzTotals(Struct):
    """Sums over cases. `memory_mib` is the largest memory of one process so far."""

    cases: int = 0
    passed: int = 0
    refused: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[int, str]] = field(default_factory=list)
    hung: list[int] = field(default_factory=list)
    memory_mib: float = 0.0

    def add(self, result: CaseResult) -> None:
        self.cases += 1
        self.passed += result.passed
        self.refused += result.refused
        self.kinds.update(set(result.kinds))
        if result.hung:
            self.hung.append(result.seed)
        elif result.wrong:
            self.wrong.append((result.seed, result.wrong))

    def merge(self, other: "FuzzTotals") -> None:
        for name in ("cases", "passed", "refused", "kinds", "wrong", "hung"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.memory_mib = max(self.memory_mib, other.memory_mib)


def run_cases(seeds: Sequence[int]) -> FuzzTotals:
    """Run the cases of these seeds in this process."""
    totals = FuzzTotals()
    uvloop.run(_on_stands(iter(seeds), totals))
    totals.memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return totals


async def _on_stands(seeds: Iterator[int], totals: FuzzTotals) -> None:
    async def work() -> None:
        while await one():
            """The next case does not see what a wrong one left behind."""

    async def one() -> bool:
        """Whether a case went wrong, and others may be left."""
        async with fuzz_stand() as stand:
            for seed in seeds:
                result = await stand.run(seed)
                totals.add(result)
                if result.wrong:
                    return True
        return False

    async with asyncio.TaskGroup() as tasks:
        for _ in range(_STANDS):
            tasks.create_task(work())
