"""Schedules vLLM's steps: with ended episodes evicted first, or under a guard's budget.

`scheduler_cls` names these classes; vLLM makes one in the engine core's process.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from ebbtide.grants import Page
from ebbtide.rollout_worker.engine.vllm.borrowed_engine import PAGE
from ebbtide.rollout_worker.engine.vllm.kv_cache import ENDED, EndedPrefixes, KvBalloon, PreemptionCount
from ebbtide.types.grants import Budget

#: Without a budget, the interval at which the engine core reads its messages (half a millisecond each time),
_LISTEN_S: Final = 0.02
#: and the interval after it has stood still for `_LONG_S`. An install or a drain waits no longer.
_LISTEN_LONG_S: Final = 0.05
_LONG_S: Final = 0.25
#: Pause after a step that could use none of its budget (no memory for keys and values).
_FRUITLESS_S: Final = 0.01


class _EvictsEnded:
    """Evicts what ended episodes left in the prefix cache before anything else, and counts preemptions.

    vLLM evicts the cached blocks that were unused for longest. An episode that is over was used last, and its cache is
    of no use; episodes that wait for their environments are older, and will be back. `VllmEngine.forget` names the
    ended ones by ids that no request has, on the way of aborts: vLLM ignores unknown ids, and no other message reaches
    a scheduler.
    """

    kv_cache_manager: Any
    _ended: EndedPrefixes | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._preemptions = PreemptionCount.inherited()

    def _preempt_request(self, *args: Any, **kwargs: Any) -> Any:
        if self._preemptions is not None:
            self._preemptions.add()
        return super()._preempt_request(*args, **kwargs)  # type: ignore[misc]

    def _free_request_blocks(self, request: Any) -> None:
        if request.session_id:
            self._prefixes.note(request.session_id, self.kv_cache_manager.get_blocks(request.request_id).blocks)
        super()._free_request_blocks(request)  # type: ignore[misc]

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        if request_ids is not None and not isinstance(request_ids, str):
            request_ids = list(request_ids)
            for name in request_ids:
                if name.startswith(ENDED):
                    self._prefixes.forget(name.removeprefix(ENDED))
        return super().finish_requests(request_ids, finished_status)  # type: ignore[misc]

    @property
    def _prefixes(self) -> EndedPrefixes:
        if self._ended is None:
            self._ended = EndedPrefixes(self.kv_cache_manager.block_pool)
        return self._ended


class EvictingScheduler(_EvictsEnded, Scheduler):  # type: ignore[misc]
    """For engines that schedule a step when the one before has ended."""


class EvictingAsyncScheduler(_EvictsEnded, AsyncScheduler):  # type: ignore[misc]
    """For engines that schedule a step ahead."""


class BudgetedScheduler(Scheduler):  # type: ignore[misc]
    """Runs vLLM's scheduler under a guard's budget: a step begins only while the page of grants has room for it.

    Invariant: `stepping` in the page is set from before a step is scheduled until its tokens are out. There is one step
    at a time: a borrowed engine schedules synchronously, so that a reclaim waits for one step and not for two. No step
    has more tokens or requests than its budget; of the running requests without room in it, those that waited longest
    go first in the next. Without a budget the scheduler sleeps, but wakes often enough for the engine core to receive
    messages.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._page = Page(Path(os.environ[PAGE]))
        self._balloon = KvBalloon(self)
        blocks: int = self.kv_cache_manager.block_pool.num_gpu_blocks
        size = sum(tensor.size for tensor in self.kv_cache_config.kv_cache_tensors)
        self._page.enter(os.getpid(), blocks, size // blocks)
        most: tuple[int, int] = (self.max_num_scheduled_tokens, self.max_num_active_reqs)  # type: ignore[has-type]
        self._most_tokens, self._most_requests = most
        self._turns: dict[str, int] = {}  # the last step of each running request
        self._kv_blocks = -1  # at the last fit
        self._stepped_at = 0.0
        self._fruitless = False

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule within the budget; nothing if none comes within a moment."""
        waited = self._await() if self.has_unfinished_requests() else Budget()
        self._kv_blocks = self._page.kv_blocks
        self._balloon.fit(self._kv_blocks)
        budget = self._page.begin_step() if waited.tokens else waited
        self._fit(budget)
        output = super().schedule(*args, **kwargs)
        self._balloon.scheduled(output)
        self._fruitless = bool(budget.tokens) and not output.total_num_scheduled_tokens
        if output.total_num_scheduled_tokens:
            self._turns = {name: self._turns.get(name, 0) for name in (request.request_id for request in self.running)}
            self._turns |= dict.fromkeys(output.num_scheduled_tokens, self.current_step)
        else:
            self._page.end_step(0)
            self._report()
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if scheduled := scheduler_output.total_num_scheduled_tokens:
            self._page.end_step(scheduled)
            self._stepped_at = time.monotonic()
            self._report()
        return outputs

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Cut the blocks to the page's limit here too: without requests, no step does it. Blocks that are held back
        would prevent the reset."""
        self._balloon.squeeze(self._page.kv_blocks)
        self._balloon.deflate()
        try:
            return super().reset_prefix_cache(*args, **kwargs)
        finally:
            self._balloon.squeeze(self._page.kv_blocks)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._balloon.preempted(request)
        return super()._preempt_request(request, *args, **kwargs)

    def _await(self) -> Budget:
        if self._fruitless:
            self._page.await_ring(_FRUITLESS_S)
        still_s = time.monotonic() - self._stepped_at
        return self._page.await_budget(_LISTEN_S if still_s < _LONG_S else _LISTEN_LONG_S, kv_blocks=self._kv_blocks)

    def _fit(self, budget: Budget) -> None:
        """Limit the next step to `budget`."""
        self.max_num_scheduled_tokens = min(self._most_tokens, budget.tokens)
        self.max_num_active_reqs = min(self._most_requests, budget.sequences)
        if not budget.tokens:
            return
        # vLLM takes them in this order: a long prompt that filled a step comes after the others in the next.
        self.running.sort(key=lambda request: self._turns.get(request.request_id, 0))
        later = self.current_step + 2  # the step after the next
        for place, request in enumerate(self.running):
            request.next_decode_eligible_step = 0 if place < budget.sequences else later

    def _report(self) -> None:
        running, waiting = self.get_request_counts()
        self._page.report(
            running=running, waiting=waiting, kv_used=self._balloon.used, recomputed=self._balloon.recomputed
        )
