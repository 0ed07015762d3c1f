"""Has vLLM verify drafts of grouped requests: the worker's side (`Speculation`), and the proposer in engine processes.

The worker's process imports this before torch is prepared: nothing here imports torch or vLLM at once.
"""

import asyncio
import os
import time
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from msgspec import convert

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker import metrics
from ebbtide.rollout_worker.engine import DraftSource
from ebbtide.rollout_worker.engine.vllm import cpu_build
from ebbtide.rollout_worker.engine.vllm.group_drafts import BatchRow, DraftedBatch, DraftReport
from ebbtide.types.fleet import DraftingState

if TYPE_CHECKING:
    import torch


log = telemetry.get_logger(__name__)

#: Name of a request's `DraftSource` among its extra arguments, on the way to the proposer in the engine's process.
DRAFTS: Final = "ebbtide_drafts"
#: Variable with the MiB that trees may take in each engine process.
TREES_MIB: Final = "EBBTIDE_DRAFT_TREES_MIB"
_PROPOSER: Final = "ebbtide.rollout_worker.engine.vllm.speculation.GroupedProposer"
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
    """Tells the proposers in an engine's processes of new weights, and reports what drafts came to.

    Invariant: `report` is the newest that a proposer told. A lost one costs nothing: the next one has the same sums.
    """

    def __init__(self, llm: Any) -> None:
        """`llm`: vLLM's AsyncLLM, with `speculation_arguments`."""
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


class GroupedProposer:
    """Proposes drafts to vLLM's model runner, as its `custom_class`, from the suffix trees of the requests' groups.

    vLLM makes one in each engine process. It hands over a batch's tokens, but not whose they are: `bind` gives the
    runner, which knows. Until then nothing is drafted.
    """

    def __init__(self, config: Any) -> None:
        """`config`: vLLM's."""
        from arctic_inference.suffix_decoding._C import SuffixTree

        if cpu_build.is_cpu_build():
            repair_verification()
        self._runner: Any = None
        self._most_length: int = config.model_config.max_model_len
        self._sources: dict[str, DraftSource | None] = {}
        self._batch = DraftedBatch(
            SuffixTree,
            longest=config.speculative_config.num_speculative_tokens,
            most=config.scheduler_config.max_num_batched_tokens - config.scheduler_config.max_num_seqs,
            most_bytes=int(os.environ[TREES_MIB]) << 20,
        )

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is no model."""

    def bind(self, runner: Any) -> None:
        self._runner = runner

    def told(self, runner: Any) -> DraftReport:  # noqa: ARG002 - every call names it
        """What drafts came to."""
        return self._batch.report

    def install(self, runner: Any) -> None:  # noqa: ARG002 - every call names it
        self._batch.install()

    def propose(self, sampled: list[list[int]], lengths: Any, tokens: Any, **_: Any) -> list[list[int]]:
        """Drafts for each request of the batch. `sampled`: its new tokens; `lengths` (N) and `tokens` (N, T): all."""
        if self._runner is None:
            return [[] for _ in sampled]
        names = self._runner.input_batch.req_ids
        for gone in self._sources.keys() - set(names):
            del self._sources[gone]
        rows = [self._row(names[at], at, new, int(lengths[at]), tokens) for at, new in enumerate(sampled)]
        return self._batch.step(rows, time.monotonic())

    def _row(self, name: str, at: int, new: list[int], length: int, tokens: Any) -> BatchRow:
        request = self._runner.requests[name]
        params = request.sampling_params
        if name not in self._sources:
            found = (params.extra_args or {}).get(DRAFTS)
            self._sources[name] = convert(found, DraftSource) if found else None
        prompt: int = request.num_prompt_tokens
        return BatchRow(
            name=name,
            source=self._sources[name],
            prompt=prompt,
            tokens=partial(_tokens, tokens[at]),
            length=length,
            made=len(new),
            room=min(self._most_length - length, params.max_tokens - (length - prompt)) - 1,
            # Below its least length end tokens are barred, and vLLM bars them behind a draft without counting it.
            fixed=length - prompt < params.min_tokens,
        )


def _tokens(tokens: Any, first: int, last: int) -> list[int]:
    found: list[int] = tokens[first:last].tolist()
    return found


def spread(
    values: "torch.Tensor", sums: "torch.Tensor", count: int, replace_from: float = 0, replace_to: float = 0
) -> "torch.Tensor":
    """Each request's value (N) for each of its draft tokens (`count`): `sums` (N) counts tokens up to and with its own.
    `replace_from` becomes `replace_to`."""
    import torch

    counts = torch.diff(sums, prepend=sums.new_zeros(1)).to(torch.int64)
    found = values.repeat_interleave(counts, output_size=count)
    return torch.where(found == replace_from, torch.full_like(found, replace_to), found)


def repair_verification() -> None:
    """Have this process's sampler spread values by `spread`, as CPU builds of vLLM 0.32 need it.

    There, temperatures and limits of requests are spread over their draft tokens by a kernel that writes into a copy of
    the result: what is read is memory as it was. Greedy requests read none of it.
    """
    from vllm.v1.sample import rejection_sampler

    sampler: Any = rejection_sampler
    sampler.expand_batch_to_tokens = spread
