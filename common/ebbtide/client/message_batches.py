"""Lists cut to what one message may carry."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

T = TypeVar("T")

#: Half of a message's 4 MiB, so that ids and framing fit beside the payload.
_MAX_BYTES: Final = 2 << 20
#: Small enough for the store to take in one script without holding up others.
_MAX_ITEMS: Final = 1024


def batches(items: Iterable[T], size: Callable[[T], int] = lambda _: 0) -> Iterator[list[T]]:
    """`items` in order, in lists of at most 1,024 and about 2 MiB; `size` tells an item's payload in bytes."""
    batch: list[T] = []
    total = 0
    for item in items:
        weight = size(item)
        if batch and (len(batch) >= _MAX_ITEMS or total + weight > _MAX_BYTES):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += weight
    if batch:
        yield batch
