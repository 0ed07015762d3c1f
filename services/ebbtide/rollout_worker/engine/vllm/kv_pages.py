"""Gives the memory of single blocks of keys and values back to the system, on CPUs; the next use allocates it again.

A CPU engine's tensors are ordinary memory, which stays resident once touched. Pages wholly within released blocks are
dropped (MADV_DONTNEED) and read as zeros until they are written: the next user of a block writes a token's keys and
values before it reads them. On a GPU the pool is one reservation, and this does nothing.
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
    """The pages of the engine in this process; none if its tensors are elsewhere."""

    def __init__(self, vllm_config: Any, blocks: int) -> None:
        self._config, self._blocks = vllm_config, blocks
        self._strips: list[tuple[int, int]] | None = None

    def release(self, block_ids: Sequence[int]) -> None:
        """Free the memory of these blocks. No request may be using them."""
        if self._strips is None:  # vLLM makes the tensors after the scheduler
            self._strips = list(_strips(self._config, self._blocks))
        for first, count in _runs(block_ids):
            for start, size in self._strips:
                drop_pages(start + first * size, count * size)


def drop_pages(start: int, size: int) -> None:
    """Give the pages wholly within `size` bytes at the address `start` back to the system, with their content. Raises
    `OSError`."""
    begin, end = -(-start // _PAGE) * _PAGE, (start + size) // _PAGE * _PAGE
    if begin < end and _madvise(begin, end - begin, _MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "memory cannot be given back")


def _strips(config: Any, blocks: int) -> Iterator[tuple[int, int]]:
    """Runs of adjacent blocks: the address of the first one, and the bytes of each."""
    seen: set[int] = set()
    for layer in config.compilation_config.static_forward_context.values():
        cache = getattr(layer, "kv_cache", None)
        if not isinstance(cache, torch.Tensor) or cache.device.type != "cpu" or cache.data_ptr() in seen:
            continue
        # Only where blocks are the outermost dimension; others stay resident.
        if cache.dim() and cache.shape[0] == blocks and cache.is_contiguous():
            seen.add(cache.data_ptr())
            yield cache.data_ptr(), cache.stride(0) * cache.element_size()


def _runs(block_ids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The first block and the length of each run of consecutive ones."""
    for _, run in groupby(enumerate(sorted(block_ids)), key=lambda pair: pair[1] - pair[0]):
        found = [block for _, block in run]
        yield found[0], len(found)
