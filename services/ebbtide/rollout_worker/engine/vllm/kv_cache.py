"""Manages vLLM's memory for keys and values beyond what vLLM does: what rollouts may use, and what is evicted first.

`KvBalloon` holds blocks back, so that rollouts use no more of a pool than a guard allows; on CPUs their memory goes
back to the system (`KvPages`). `EndedPrefixes` has the blocks of texts that have ended evicted before others.
`PreemptionCount` says how often vLLM took a request's memory.

The worker's process imports this before torch is prepared: nothing here imports torch or vLLM at once.
"""

import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from ebbtide.rollout_worker.engine.kv_victims import HeldRequest, choose_victims

#: Before the name of a text that has ended, in an id that no request has.
ENDED: Final = "ended/"
#: Blocks without content: vLLM keeps one for itself, which is never free.
_NULL: Final = 1
#: Names the file to the engine's process.
_FILE: Final = "EBBTIDE_PREEMPTION_COUNT"
_BYTES: Final = 8
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_MADV_DONTNEED: Final = 4
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class KvBalloon:
    """Holds blocks of one scheduler's pool back, in its process and thread. Only for engines with one step at a time.

    Invariant: after each `fit`, used and held blocks together do not exceed the pool, nor used ones the limit.
    Preempted requests lose no token: vLLM computes their keys and values again when there is room. The victims are
    chosen by that cost, also where the pool is full for other reasons; vLLM itself would take the youngest. A request
    that is longer than the limit waits without blocking others. Held blocks are those that vLLM would use next for new
    content.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._block_size: int = scheduler.block_size
        self._step_tokens: int = scheduler.scheduler_config.max_num_batched_tokens
        self._watermark: int = self._manager.watermark_blocks
        self._held: list[Any] = []
        self._pages = KvPages(scheduler.vllm_config, self._pool.num_gpu_blocks)
        self._lost: dict[str, int] = {}  # tokens whose keys and values a waiting request had
        self._parked: list[Any] = []
        self.recomputed = 0  # tokens that were computed again

    @property
    def used(self) -> int:
        """Blocks that requests use."""
        return int(self._pool.num_gpu_blocks - _NULL - self._pool.get_num_free_blocks() - len(self._held))

    def fit(self, kv_blocks: int) -> None:
        """Limit the used blocks to `kv_blocks`, below 0: to all. Call it before each step is scheduled, and `scheduled`
        after it."""
        allowed, total = self.squeeze(kv_blocks), self._pool.num_gpu_blocks - _NULL
        self._make_room()
        self._park(allowed)
        # Running requests may grow by a block each before others enter: these would be preempted again at once.
        self._manager.watermark_blocks = self._watermark + (len(self._scheduler.running) if allowed < total else 0)

    def squeeze(self, kv_blocks: int) -> int:
        """Hold the blocks above the limit back, between steps. Returns how many may be used."""
        total = int(self._pool.num_gpu_blocks - _NULL)
        allowed = total if kv_blocks < 0 else min(kv_blocks, total)
        excess = len(self._held) - (total - allowed)
        if excess > 0:
            self._give_back(excess)
        elif excess < 0:
            self._free(-excess)
            self._hold(min(-excess, self._free_blocks))
        return allowed

    def scheduled(self, output: Any) -> None:
        """Call it after each step's scheduling, with its output."""
        for request in reversed(self._parked):
            self._scheduler.waiting.prepend_request(request)
        self._parked.clear()
        if self._lost:
            for name in self._lost.keys() & output.num_scheduled_tokens.keys():
                found = self._scheduler.requests[name].num_computed_tokens - output.num_scheduled_tokens[name]
                self.recomputed += max(0, self._lost.pop(name) - found)

    def preempted(self, request: Any) -> None:
        """Call it before vLLM takes a request's blocks."""
        self._lost = {name: lost for name, lost in self._lost.items() if name in self._scheduler.requests}
        self._lost[request.request_id] = max(request.num_computed_tokens, self._lost.get(request.request_id, 0))

    def deflate(self) -> None:
        """Hold nothing: vLLM resets its prefix cache only while no block is taken."""
        self._give_back(len(self._held))

    @property
    def _free_blocks(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def _hold(self, count: int) -> None:
        blocks = self._pool.get_new_blocks(count)
        self._held += blocks
        self._pages.release([block.block_id for block in blocks])

    def _give_back(self, count: int) -> None:
        """They have no content: vLLM uses them next."""
        if count:
            self._pool.free_blocks(self._held[-count:])
            del self._held[-count:]

    def _make_room(self) -> None:
        """Preempt until all running requests can get the blocks for their next tokens."""
        running = self._scheduler.running
        if self._free_blocks > 2 * (len(running) + self._step_tokens // self._block_size):
            return
        while running and (lack := sum(map(self._growth, running)) - self._free_blocks) > 0:
            self._preempt_for(lack, growing=True)

    def _growth(self, request: Any) -> int:
        """Blocks that the request lacks for its next tokens."""
        next_tokens = min(request.num_tokens_with_spec, request.num_computed_tokens + self._step_tokens)
        needed = -(-next_tokens // self._block_size)
        return sum(max(0, needed - len(group)) for group in self._manager.get_blocks(request.request_id).blocks)

    def _free(self, wanted: int) -> None:
        """Preempt until so many blocks are free, or no request runs."""
        while self._scheduler.running and (lack := wanted - self._free_blocks) > 0:
            self._preempt_for(lack)

    def _preempt_for(self, lack: int, *, growing: bool = False) -> None:
        """Preempt requests that free `lack` blocks; `growing`: a victim's next blocks count too."""
        held = [self._describe(request, growing=growing) for request in self._scheduler.running]
        # Requests that share all their blocks free none one by one, but some together.
        names = choose_victims(held, lack) or [min(held, key=lambda item: item.computed).request]
        for request in [request for request in self._scheduler.running if request.request_id in names]:
            self._preempt(request)

    def _preempt(self, request: Any) -> None:
        self._scheduler.running.remove(request)
        # It may come back in this very step, when the model runner's state of it is no longer valid.
        self._scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        self._scheduler._preempt_request(request, time.monotonic())  # noqa: SLF001 - as vLLM's own subclasses do

    def _describe(self, request: Any, *, growing: bool) -> HeldRequest:
        blocks = [block for group in self._manager.get_blocks(request.request_id).blocks for block in group]
        own = sum(block.ref_cnt == 1 and not block.is_null for block in blocks)
        shared = request.num_computed_tokens * (len(blocks) - own) // max(1, len(blocks))
        return HeldRequest(
            request=request.request_id,
            computed=request.num_computed_tokens,
            blocks=own + (self._growth(request) if growing else 0),
            shared=shared,
            remaining=max(1, request.max_tokens - request.num_output_tokens),
        )

    def _park(self, allowed: int) -> None:
        """Take requests out of the queue, for one step, that could not make even one more block of tokens with all
        allowed blocks."""
        waiting = self._scheduler.waiting
        if not waiting or allowed == self._pool.num_gpu_blocks - _NULL:
            return
        most = allowed // max(1, self._manager.num_kv_cache_groups) * self._block_size
        self._parked = [
            request
            for request in waiting
            if min(request.num_tokens + self._block_size, request.num_prompt_tokens + request.max_tokens) > most
        ]
        if self._parked:
            waiting.remove_requests(self._parked)


class KvPages:
    """Gives the memory of single blocks of keys and values back to the system, on CPUs. The next use allocates it.

    A CPU engine's tensors are ordinary memory, which stays resident once touched. Pages wholly within released blocks
    are dropped (MADV_DONTNEED) and read as zeros until they are written: the next user of a block writes a token's keys
    and values before it reads them. On a GPU the pool is one reservation, and this does nothing; nor where the tensors
    are not in this process.
    """

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
    import torch  # in an engine's process alone: a worker prepares its own for it first

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


class _Link:
    """One block of a text. `before`: the hash of the block before it, in the same group of layers."""

    __slots__ = ("before", "block", "needed")

    def __init__(self) -> None:
        self.block: Any = None
        self.before: Any = None
        self.needed = 0  # by so many links behind it and ends of texts


class EndedPrefixes:
    """Moves the cached blocks of texts that have ended to the front of vLLM's queue of free blocks.

    Texts share the blocks of what they begin with: a system prompt, or the prompt of a group. A block is moved when the
    last remembered text that has it ends.

    Invariant: `_texts` has the end of each remembered text by its episode, the one noted last at the end, and `_links`
    the blocks of all of them by their hashes, each once. Neither has more members than the pool has blocks. A link
    counts the links behind it and the texts that end with it. A block is moved only while nobody uses it and it still
    has the content that it had then. Lost with the engine's process: the order is vLLM's own.
    """

    def __init__(self, pool: Any) -> None:
        """`pool`: vLLM's block pool."""
        self._pool = pool
        self._links: dict[Any, _Link] = {}
        self._texts: dict[str, list[Any]] = {}

    @property
    def remembered(self) -> int:
        """Blocks of all remembered texts, each once."""
        return len(self._links)

    def note(self, name: str, groups: Sequence[Sequence[Any]]) -> None:
        """Note the blocks of an episode's request that finishes, by groups of layers, in the order of its tokens. They
        take the place of those that were noted of the episode before.
        """
        ends = [end for blocks in groups if (end := self._chain(blocks)) is not None]
        self._let_go(name)
        if ends:
            self._texts[name] = ends
        most = self._pool.num_gpu_blocks
        while max(len(self._links), len(self._texts)) > most and len(self._texts) > 1:
            self._let_go(next(iter(self._texts)))

    def forget(self, name: str) -> None:
        """Have the blocks that only this text has be evicted first, the last ones of it before others.

        Unknown names are ignored.
        """
        gone = self._unlinked(self._texts.pop(name, ()))
        unused = [link.block for known, link in gone if not link.block.ref_cnt and link.block.block_hash == known]
        queue = self._pool.free_block_queue
        for block in unused:
            queue.remove(block)
        queue.prepend_n(unused)

    def _chain(self, blocks: Iterable[Any]) -> Any:
        """Link the cached ones of these blocks, and count the text's end. Returns its hash; None without blocks."""
        before: Any = None
        for block in blocks:
            known = block.block_hash
            if known is None:
                continue
            link = self._links.get(known)
            if link is None:
                link = self._links[known] = _Link()
            if link.before is None and before is not None:  # new, or the window of another text began with it
                link.before = before
                self._links[before].needed += 1
            link.block, before = block, known
        if before is not None:
            self._links[before].needed += 1
        return before

    def _let_go(self, name: str) -> None:
        for _ in self._unlinked(self._texts.pop(name, ())):
            pass

    def _unlinked(self, ends: Iterable[Any]) -> Iterator[tuple[Any, _Link]]:
        """Forget a text that ends so. Yields what no other one has, from each end on."""
        for end in ends:
            known = end
            while known is not None:
                link = self._links[known]
                link.needed -= 1
                if link.needed:
                    break
                del self._links[known]
                yield known, link
                known = link.before


class PreemptionCount:
    """Counts how often vLLM's scheduler takes a request's memory, across its process and the worker's.

    vLLM's own count is in statistics that cost time for each token, so they are off.

    Invariant: the file has one number, which only the scheduler's process writes. Lost with the worker.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)

    @classmethod
    def made(cls) -> "PreemptionCount":
        """A new count, for the engine that starts next."""
        handle, name = tempfile.mkstemp(prefix="ebbtide-preemptions-")
        with os.fdopen(handle, "wb") as file:
            file.write(bytes(_BYTES))
        os.environ[_FILE] = name
        return cls(Path(name))

    @classmethod
    def inherited(cls) -> "PreemptionCount | None":
        """The worker's count, in an engine's process; None below no worker."""
        name = os.environ.get(_FILE)
        return cls(Path(name)) if name and Path(name).exists() else None

    @property
    def value(self) -> int:
        return int.from_bytes(self._map[:], "little")

    def add(self) -> None:
        self._map[:] = (self.value + 1).to_bytes(_BYTES, "little")

    def remove(self) -> None:
        """The engine has ended."""
        self._path.unlink(missing_ok=True)
