"""Memory of single blocks of keys and values, given back to the system and had again by use: on CPUs.

A CPU engine's tensors are ordinary memory, which stays resident once it was touched. Pages that lie wholly within
released blocks are dropped (MADV_DONTNEED) and read as zeros until they are written: the next user of a block writes a
token's keys and values before it reads them. On a GPU the pool is one reservation, and nothing is done.
"""

import ctypes
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final

import torch

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_MADV_DONTNEED: Final = 4
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class KvPages:
    """Of the engine in this process; of one whose tensors are elsewhere there is nothing to release."""

    def __init__(self, vllm_config: Any, blocks: int) -> None:
        self._config, self._blocks = vllm_config, blocks
        self._strips: list[tuple[int, int]] | None = None

    def release(self, block_ids: Sequence[int]) -> None:
        """Let the memory of these blocks go; nobody may be using them."""
        if self._strips is None:
            # Not before they are asked for: the tensors come after the scheduler.
            self._strips = list(_strips(self._config, self._blocks))
        for first, count in _runs(block_ids):
            for start, size in self._strips:
                drop_pages(start + first * size, count * size)


def drop_pages(start: int, size: int) -> None:
    """Give the pages that lie wholly within `size` bytes at the address `start` back to the system. Whatever was in
    them is lost. Raises `OSError`."""
    begin, end = -(-start // _PAGE) * _PAGE, (start + size) // _PAGE * _PAGE
    if begin < end and _madvise(begin, end - begin, _MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "memory cannot be given back")


def _strips(config: Any, blocks: int) -> Iterator[tuple[int, int]]:
    """Where blocks lie one behind the other: the address of the first one, and the bytes of each."""
    seen: set[int] = set()
    for layer in config.compilation_config.static_forward_context.values():
        cache = getattr(layer, "kv_cache", None)
        if not isinstance(cache, torch.Tensor) or cache.device.type != "cpu" or cache.data_ptr() in seen:
            continue
        # Only where blocks are the outermost dimension: anything else is left as it is.
        if cache.dim() and cache.shape[0] == blocks and cache.is_contiguous():
            seen.add(cache.data_ptr())
            yield cache.data_ptr(), cache.stride(0) * cache.element_size()


def _runs(block_ids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Neighbouring blocks together: the first one of each run, and how many it has."""
    for _, run in groupby(enumerate(sorted(block_ids)), key=lambda pair: pair[1] - pair[0]):
        found = [block for _, block in run]
        yield found[0], len(found)
