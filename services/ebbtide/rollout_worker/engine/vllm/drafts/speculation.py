"""Talks to the proposer of drafts in an engine's processes: tells it of new weights, and reports what drafts came to.

Invariant: `report` is the newest that the proposer told. A lost one costs nothing: the next one has the same sums.
"""

import asyncio
from importlib.util import find_spec
from typing import Any, Final

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker import metrics
from ebbtide.types.fleet import DraftingState

log = telemetry.get_logger(__name__)

#: Variable with the MiB that trees may take in each engine process.
TREES_MIB: Final = "EBBTIDE_DRAFT_TREES_MIB"
_PROPOSER: Final = "ebbtide.rollout_worker.engine.vllm.drafts.grouped_proposer.GroupedProposer"
#: The proposer is asked so often what drafts came to.
_ASK_S: Final = 5.0


def speculation_arguments(tokens: int, *, borrowed: bool) -> dict[str, Any]:
    """vLLM's arguments for drafts of so many tokens from groups. Raises `InvalidRequest` where there can be none."""
    if borrowed:
        raise InvalidRequest("must be off on a borrowed worker: grants count no drafts", field="vllm.speculation")
    if find_spec("arctic_inference") is None:
        raise InvalidRequest("needs arctic-inference: install ebbtide[drafts], or set off", field="vllm.speculation")
    return {
        "speculative_config": {"method": "custom_class", "model": _PROPOSER, "num_speculative_tokens": tokens},
        "async_scheduling": False,  # vLLM has none with proposers of others
    }


class Speculation:
    """`llm`: vLLM's AsyncLLM, with `speculation_arguments`."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._task: asyncio.Task[None] | None = None
        self._told: dict[str, int] = {}
        self.report: dict[str, Any] = {}

    @property
    def state(self) -> DraftingState | None:
        """The newest report, for the coordinator."""
        told = self.report
        return DraftingState(**{name: told[name] for name in DraftingState.__struct_fields__}) if told else None

    async def start(self) -> None:
        """Let drafting begin."""
        await self._ask("bind")
        self._task = asyncio.create_task(self._run(), name="speculation")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def install(self) -> None:
        """The engine generates under another version now."""
        await self._ask("install")

    async def refresh(self) -> None:
        """Ask what drafts came to."""
        for report in await self._ask("told"):
            if report is not None:  # of ranks, those with the last layers draft, all alike
                self._tell(report)
                return

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_ASK_S)
            try:
                await self.refresh()
            except Exception as error:  # noqa: BLE001 - `check` finds out if the engine died
                log.warning("the engine does not say what drafts came to", reason=str(error))

    def _tell(self, report: dict[str, Any]) -> None:
        self.report = report
        for name, counter in _COUNTERS.items():
            counter.inc(report[name] - self._told.get(name, 0))
            self._told[name] = report[name]
        metrics.DRAFT_TREE_BYTES.set(report["tree_bytes"])

    async def _ask(self, step: str) -> list[Any]:
        found: list[Any] = await self._llm.collective_rpc("ebbtide_drafts", args=(step,))
        return found


_COUNTERS: Final = {
    "drafts": metrics.DRAFTS,
    "drafted": metrics.DRAFT_TOKENS.labels("drafted"),
    "accepted": metrics.DRAFT_TOKENS.labels("accepted"),
}
