"""Runs simulations in several processes, and ends at the first one that fails.

What has begun then goes on to its end, as a process cannot be asked to stop; what has not begun never does.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

Wanted = TypeVar("Wanted")
Result = TypeVar("Result")


def each_simulated(
    simulate: Callable[[Wanted], Result], wanted: Sequence[Wanted], jobs: int, told: Callable[[Wanted], str]
) -> Iterator[tuple[Wanted, Result]]:
    """What is wanted with its result, in the order of the ends. `jobs`: processes at a time; `told`: names one.

    Raises `RuntimeError` with the name of one that failed.
    """
    with ProcessPoolExecutor(jobs) as pool:
        under_way = {pool.submit(simulate, one): one for one in wanted}
        try:
            for run in as_completed(under_way):
                one = under_way[run]
                if (error := run.exception()) is not None:
                    raise RuntimeError(f"the simulation {told(one)} failed: {type(error).__name__}: {error}") from error
                yield one, run.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
