"""Talks to the proposer of drafts in an engine's processes: brings siblings' tokens there, and reports what drafts
came to.

Invariant: `_runs` and `_ended` wait for the message that is on its way; with the next one they leave. What is lost with
an engine or a message costs drafts alone: later tokens of a response are learnt all the same.
"""

import asyncio
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Final

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker import metrics
from ebbtide.rollout_worker.engine import SiblingRun
from ebbtide.types.fleet import DraftingState

log = telemetry.get_logger(__name__)

#: Longest draft, as in Seer (arXiv 2511.14617): of longer ones little is accepted.
LONGEST: Final = 8
#: Variable with the MiB that trees may take in each engine process.
TREES_MIB: Final = "EBBTIDE_DRAFT_TREES_MIB"
_PROPOSER: Final = "ebbtide.rollout_worker.engine.vllm.drafts.grouped_proposer.GroupedProposer"
#: Without news, the proposer is asked so often what drafts came to.
_ASK_S: Final = 5.0


def speculation_arguments(*, borrowed: bool) -> dict[str, Any]:
    """vLLM's arguments for drafts from groups. Raises `InvalidRequest` where there can be none."""
    if borrowed:
        raise InvalidRequest("must be off on a borrowed worker: grants count no drafts", field="vllm.speculation")
    if find_spec("arctic_inference") is None:
        raise InvalidRequest("needs arctic-inference: install ebbtide[drafts], or set off", field="vllm.speculation")
    return {
        "speculative_config": {"method": "custom_class", "model": _PROPOSER, "num_speculative_tokens": LONGEST},
        "async_scheduling": False,  # vLLM has none with proposers of others
    }


class Speculation:
    """`llm`: vLLM's AsyncLLM, with `speculation_arguments`."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._runs: list[SiblingRun] = []
        self._ended: list[str] = []
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._told: dict[str, int] = {}
        self.report: dict[str, Any] = {}

    @property
    def state(self) -> DraftingState | None:
        """The newest report, for the coordinator."""
        told = self.report
        if not told:
            return None
        counts = {name: told[name] for name in ("drafts", "drafted", "accepted", "tree_bytes")}
        return DraftingState(**counts, on=told["speculating"])

    async def start(self) -> None:
        """Let drafting begin."""
        await self._ask("bind")
        self._task = asyncio.create_task(self._run(), name="speculation")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def learn(self, runs: Sequence[SiblingRun], ended: Sequence[str]) -> None:
        self._runs += runs
        self._ended += ended
        self._news.set()

    async def install(self, version: int) -> None:
        """The engine generates under `version` now."""
        await self._ask("install", version=version)

    async def refresh(self) -> None:
        """Hand over what waits, and ask what drafts came to."""
        self._news.clear()
        runs, self._runs = self._runs, []
        ended, self._ended = self._ended, []
        for report in await self._ask("learn", runs=[tuple(run) for run in runs], ended=ended):
            if report is not None:  # of ranks, those with the last layers draft, all alike
                self._tell(report)
                return

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_ASK_S):
                    await self._news.wait()
            except TimeoutError:
                pass
            try:
                await self.refresh()
            except Exception as error:  # noqa: BLE001 - `check` finds out if the engine died
                log.warning("the engine's drafts know nothing of siblings", reason=str(error))
                await asyncio.sleep(_ASK_S)

    def _tell(self, report: dict[str, Any]) -> None:
        self.report = report
        for name, counter in _COUNTERS.items():
            counter.inc(report[name] - self._told.get(name, 0))
            self._told[name] = report[name]
        metrics.SPECULATING.set(report["speculating"])
        metrics.DRAFT_TREE_BYTES.set(report["tree_bytes"])

    async def _ask(self, step: str, **arguments: Any) -> list[Any]:
        found: list[Any] = await self._llm.collective_rpc("ebbtide_drafts", args=(step,), kwargs=arguments)
        return found


_COUNTERS: Final = {
    "drafts": metrics.DRAFTS,
    "drafted": metrics.DRAFT_TOKENS.labels("drafted"),
    "accepted": metrics.DRAFT_TOKENS.labels("accepted"),
}
