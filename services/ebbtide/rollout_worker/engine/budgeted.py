"""vLLM's scheduler under a guard's budget: a step begins only while the page of grants has room for it.

Named by `scheduler_cls`; vLLM makes it in the engine core's process, where the page's path stands in the environment.
Invariant: `stepping` in the page is set from before a step is scheduled until its tokens are out. One step at a time:
a borrowed engine schedules synchronously, so that taking it back means waiting for one step and not for two. No step
has more tokens or requests than its budget; of those running that find no room in it, the ones that waited longest go
first in the next.
"""

import os
from pathlib import Path
from typing import Any, Final

from vllm.v1.core.sched.scheduler import Scheduler

from ebbtide.grants import Page
from ebbtide.rollout_worker.engine.borrowed import PAGE
from ebbtide.types.grants import Budget

#: Without a budget the scheduler comes back so often, for the engine core to hear what else it is told.
_LISTEN_S: Final = 0.02


class BudgetedScheduler(Scheduler):  # type: ignore[misc]
    """See the module. Implements vLLM's `SchedulerInterface`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._page = Page(Path(os.environ[PAGE]))
        blocks: int = self.kv_cache_manager.block_pool.num_gpu_blocks
        size = sum(tensor.size for tensor in self.kv_cache_config.kv_cache_tensors)
        self._page.enter(os.getpid(), blocks, size // blocks)
        most: tuple[int, int] = (self.max_num_scheduled_tokens, self.max_num_active_reqs)  # type: ignore[has-type]
        self._most_tokens, self._most_requests = most
        self._turns: dict[str, int] = {}  # the last step in which each running request was
        self._recomputed = 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """What the budget allows; nothing if there is none within a moment."""
        budget = Budget()
        if self.has_unfinished_requests() and self._page.await_budget(_LISTEN_S).tokens:
            budget = self._page.begin_step()
        self._fit(budget)
        output = super().schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            self._turns = {name: self._turns.get(name, 0) for name in (request.request_id for request in self.running)}
            self._turns |= dict.fromkeys(output.num_scheduled_tokens, self.current_step)
        elif budget.tokens:
            self._page.end_step(0)
        return output

    def _fit(self, budget: Budget) -> None:
        """Let the next step have no more than `budget`."""
        self.max_num_scheduled_tokens = min(self._most_tokens, budget.tokens)
        self.max_num_active_reqs = min(self._most_requests, budget.sequences)
        if not budget.tokens:
            return
        # vLLM goes through them in this order; a long prompt that took a whole step goes behind the others in the next.
        self.running.sort(key=lambda request: self._turns.get(request.request_id, 0))
        behind = self.current_step + 2  # the step after the one that is about to be scheduled
        for place, request in enumerate(self.running):
            request.next_decode_eligible_step = 0 if place < budget.sequences else behind

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if scheduled := scheduler_output.total_num_scheduled_tokens:
            self._page.end_step(scheduled)
            running, waiting = self.get_request_counts()
            pool = self.kv_cache_manager.block_pool
            used = pool.num_gpu_blocks - pool.get_num_free_blocks()
            self._page.report(running=running, waiting=waiting, kv_used=used, recomputed=self._recomputed)
        return outputs
