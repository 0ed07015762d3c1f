"""Proposes drafts to vLLM's model runner, as its `custom_class`, from the suffix trees of the requests' groups.

vLLM makes one in each engine process. It hands over a batch's tokens, but not whose they are: `bind` gives the runner,
which knows. Until then nothing is drafted.
"""

import os
import time
from functools import partial
from typing import Any

from msgspec import convert

from ebbtide.rollout_worker.engine import DraftSource
from ebbtide.rollout_worker.engine.vllm import cpu_build
from ebbtide.rollout_worker.engine.vllm.drafts import cpu_verification
from ebbtide.rollout_worker.engine.vllm.drafts.drafted_batch import BatchRow, DraftedBatch, DraftReport
from ebbtide.rollout_worker.engine.vllm.drafts.speculation import TREES_MIB
from ebbtide.rollout_worker.engine.vllm.vllm_conversions import DRAFTS


class GroupedProposer:
    """`config`: vLLM's."""

    def __init__(self, config: Any) -> None:
        from arctic_inference.suffix_decoding._C import SuffixTree

        if cpu_build.is_cpu_build():
            cpu_verification.repair()
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
            tokens=partial(_read, tokens[at]),
            length=length,
            made=len(new),
            room=min(self._most_length - length, params.max_tokens - (length - prompt)) - 1,
            # Below its least length end tokens are barred, and vLLM bars them behind a draft without counting it.
            fixed=length - prompt < params.min_tokens,
        )


def _read(tokens: Any, first: int, last: int) -> list[int]:
    found: list[int] = tokens[first:last].tolist()
    return found
