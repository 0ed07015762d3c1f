"""vLLM's scheduler under a guard's budget: a step begins only while the page of grants has room for it.

Named by `scheduler_cls`; vLLM makes it in the engine core's process, where the page's path stands in the environment.
Invariant: `stepping` in the page is set from before a step is scheduled until its tokens are out. One step at a time:
a borrowed engine schedules synchronously, so that taking it back means waiting for one step and not for two.
"""

import os
from pathlib import Path
from typing import Any, Final

from vllm.v1.core.sched.scheduler import Scheduler

from ebbtide.grants import Page

#: The path of the page, for the engine core's process.
PAGE: Final = "EBBTIDE_GRANT_PAGE"
#: Without a budget the scheduler comes back so often, for the engine core to hear what else it is told.
_LISTEN_S: Final = 0.02


class BudgetedScheduler(Scheduler):  # type: ignore[misc]
    """See the module. Implements vLLM's `SchedulerInterface`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._page = Page(Path(os.environ[PAGE]))
        self._page.enter(os.getpid(), self.kv_cache_manager.block_pool.num_gpu_blocks)
        most: tuple[int, int] = (self.max_num_scheduled_tokens, self.max_num_running_reqs)  # type: ignore[has-type]
        self._most_tokens, self._most_requests = most

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """What the budget allows; nothing if there is none within a moment."""
        budget = self._page.await_budget(_LISTEN_S)
        if budget.tokens:
            budget = self._page.begin_step()
        self.max_num_scheduled_tokens = min(self._most_tokens, budget.tokens)
        # Those that run already stay: a smaller budget of tokens passes the last of them over for this step.
        self.max_num_running_reqs = min(self._most_requests, max(budget.sequences, len(self.running)))
        output = super().schedule(*args, **kwargs)
        if budget.tokens and not output.total_num_scheduled_tokens:
            self._page.end_step(0)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if scheduled := scheduler_output.total_num_scheduled_tokens:
            self._page.end_step(scheduled)
            running, waiting = self.get_request_counts()
            pool = self.kv_cache_manager.block_pool
            used = pool.num_gpu_blocks - pool.get_num_free_blocks()
            self._page.report(running=running, waiting=waiting, kv_used=used, recomputed=0)
        return outputs
