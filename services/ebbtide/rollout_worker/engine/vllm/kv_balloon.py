"""Holds blocks of vLLM's pool of keys and values back, so that rollouts use no more of it than a guard allows.

Invariant: after each `fit`, used and held blocks together do not exceed the pool, nor used ones the limit. Preempted
requests lose no token: vLLM computes their keys and values again when there is room. This module chooses the victims by
that cost, also where the pool is full for other reasons; vLLM itself would take the youngest. A request that is longer
than the limit waits without blocking others. Held blocks are those that vLLM would use next for new content; on a CPU
their memory goes back to the system.
"""

import time
from typing import Any, Final

from ebbtide.rollout_worker.engine.kv_victims import HeldRequest, choose_victims
from ebbtide.rollout_worker.engine.vllm.kv_pages import KvPages

#: Blocks without content: vLLM keeps one for itself, which is never free.
_NULL: Final = 1


class KvBalloon:
    """The balloon of one scheduler, in its process and thread. Only for engines with one step at a time."""

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
