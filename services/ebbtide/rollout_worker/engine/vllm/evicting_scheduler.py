"""Has vLLM's scheduler evict what ended episodes left in the prefix cache before anything else.

vLLM evicts the cached blocks that were unused for longest. An episode that is over was used last, and its cache is of
no use; episodes that wait for their environments are older, and will be back. `VllmEngine.forget` names the ended ones
by ids that no request has, on the way of aborts: vLLM ignores unknown ids, and no other message reaches a scheduler.

It also counts the requests whose memory it takes while they run.
"""

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from ebbtide.rollout_worker.engine.vllm.ended_prefixes import EndedPrefixes
from ebbtide.rollout_worker.engine.vllm.preemption_count import PreemptionCount
from ebbtide.rollout_worker.engine.vllm.vllm_conversions import ENDED


class _EvictsEnded:
    """What both schedulers do beside vLLM's own work."""

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
