"""vLLM's scheduler under a guard's budget: a step begins only while the page of grants has room for it.

Named by `scheduler_cls`; vLLM makes it in the engine core's process, where the page's path stands in the environment.
Invariant: `stepping` in the page is set from before a step is scheduled until its tokens are out. One step at a time:
a borrowed engine schedules synchronously, so that taking it back means waiting for one step and not for two. No step
has more tokens or requests than its budget; of those running that find no room in it, the ones that waited longest go
first in the next. While it stands still it sleeps, and looks up so often that the engine core hears what it is told.
"""

import os
import time
from pathlib import Path
from typing import Any, Final

from vllm.v1.core.sched.scheduler import Scheduler

from ebbtide.grants import Page
from ebbtide.rollout_worker.engine.vllm.borrowed_engine import PAGE
from ebbtide.rollout_worker.engine.vllm.kv_balloon import KvBalloon
from ebbtide.types.grants import Budget

#: Without a budget the engine core hears what else it is told so often: each time costs it half a millisecond,
_LISTEN_S: Final = 0.02
#: and so often once it has stood still for this long. An install, or a drain, waits so long at most.
_LISTEN_LONG_S: Final = 0.05
_LONG_S: Final = 0.25
#: With a budget of which nothing can be used (no memory for keys and values), this long until the next try.
_FRUITLESS_S: Final = 0.01


class BudgetedScheduler(Scheduler):  # type: ignore[misc]
    """See the module. Implements vLLM's `SchedulerInterface`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._page = Page(Path(os.environ[PAGE]))
        self._balloon = KvBalloon(self)
        blocks: int = self.kv_cache_manager.block_pool.num_gpu_blocks
        size = sum(tensor.size for tensor in self.kv_cache_config.kv_cache_tensors)
        self._page.enter(os.getpid(), blocks, size // blocks)
        most: tuple[int, int] = (self.max_num_scheduled_tokens, self.max_num_active_reqs)  # type: ignore[has-type]
        self._most_tokens, self._most_requests = most
        self._turns: dict[str, int] = {}  # the last step in which each running request was
        self._kv_blocks = -1  # as fitted last
        self._stepped_at = 0.0
        self._fruitless = False

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """What the budget allows; nothing if there is none within a moment."""
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
        """What the page does not allow goes here too: without requests nothing is scheduled, and so nothing is cut. But
        blocks that are held back would be in the reset's way."""
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
        """Let the next step have no more than `budget`."""
        self.max_num_scheduled_tokens = min(self._most_tokens, budget.tokens)
        self.max_num_active_reqs = min(self._most_requests, budget.sequences)
        if not budget.tokens:
            return
        # vLLM goes through them in this order: a long prompt that took all of a step is behind the others in the next.
        self.running.sort(key=lambda request: self._turns.get(request.request_id, 0))
        behind = self.current_step + 2  # the step after the one that is about to be scheduled
        for place, request in enumerate(self.running):
            request.next_decode_eligible_step = 0 if place < budget.sequences else behind

    def _report(self) -> None:
        running, waiting = self.get_request_counts()
        self._page.report(
            running=running, waiting=waiting, kv_used=self._balloon.used, recomputed=self._balloon.recomputed
        )
