"""Plays vLLM's engine core for an `AsyncLLM` of this process: a token for each request in each step that a test plays.

All behind the core is vLLM's own: decoded messages, output processor, collectors, generators. As the core's, messages
are encoded; they carry the id and the logprob of each token, as `logprobs=0` asks for.
"""

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from ebbtide.rollout_worker.engine.vllm.vllm_engine import EnginePauses, VllmEngine
from ebbtide.rollout_worker.settings import VllmSettings


class PlayedCore:
    """What `AsyncLLM` calls of its `EngineCoreClient`. `requests`: by their internal ids, in the order of arrival."""

    def __init__(self, version: str = "1") -> None:
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        self.requests: dict[str, Any] = {}
        self.made: dict[str, int] = {}  # tokens of each request, by its external id
        self.paused = False
        self.version = version
        self.resources = SimpleNamespace(engine_dead=False, output_queue_task=None)
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request_async(self, request: Any) -> None:
        self.requests[request.request_id] = request
        self.made.setdefault(request.external_req_id, 0)

    async def abort_requests_async(self, names: Iterable[str]) -> None:
        for name in names:
            self.requests.pop(name, None)

    async def get_output_async(self) -> Any:
        outputs = await self._outputs.get()
        if isinstance(outputs, Exception):
            raise outputs
        return outputs

    async def pause_scheduler_async(self, **_: Any) -> None:
        self.paused = True

    async def resume_scheduler_async(self) -> None:
        self.paused = False

    def shutdown(self, timeout: float | None = None) -> None: ...

    def encoded(self, tokens: Sequence[int], *, first: bool = False) -> Sequence[Any]:
        """The message of a step that makes these tokens, one for each request in order. `first`: it read prompts."""
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
        from vllm.v1.metrics.stats import PrefillStats
        from vllm.v1.outputs import LogprobsLists

        outputs = []
        ids = np.array(tokens, dtype=np.int32)[:, None]
        values, ranks = -(ids % 16).astype(np.float32) / 16, np.ones(len(ids), dtype=np.int32)
        batch = LogprobsLists(ids, values, ranks)
        for place, (name, request) in enumerate(self.requests.items()):
            made = self.made[request.external_req_id] + 1
            outputs.append(
                EngineCoreOutput(
                    request_id=name,
                    new_token_ids=[int(tokens[place])],
                    new_logprobs=batch.slice_request(place, 1),
                    finish_reason=FinishReason.LENGTH if made == request.sampling_params.max_tokens else None,
                    prefill_stats=PrefillStats() if first else None,
                )
            )
        message: Sequence[Any] = self._encoder.encode(EngineCoreOutputs(outputs=outputs, weight_version=self.version))
        return message

    def send(self, message: Sequence[Any]) -> None:
        """Deliver the message, once."""
        self._outputs.put_nowait(self._decoder.decode(message))

    def step(self) -> None:
        """Make a token of each request, unless generation is paused."""
        if self.paused or not self.requests:
            return
        self.send(self.encoded([2 + self.made[one.external_req_id] % 90 for one in self.requests.values()]))
        for name, request in list(self.requests.items()):
            self.made[request.external_req_id] += 1
            if self.made[request.external_req_id] == request.sampling_params.max_tokens:
                del self.requests[name]

    def die(self) -> None:
        """The core's process is gone."""
        from vllm.v1.engine.exceptions import EngineDeadError

        self.resources.engine_dead = True
        self._outputs.put_nowait(EngineDeadError())


def played_engine(model: Path, slots: int, settings: VllmSettings) -> tuple[VllmEngine, PlayedCore]:
    """An engine that has booted but for its core. In a running loop."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import EngineCoreClient

    from ebbtide.rollout_worker.engine.vllm import vllm_plugin

    engine, core = VllmEngine(str(model), slots, settings), PlayedCore()
    engine.set_environment()
    vllm_plugin.register()
    config = AsyncEngineArgs(**engine._arguments()).create_engine_config()
    with patch.object(EngineCoreClient, "make_async_mp_client", lambda **_: core):
        engine._llm = AsyncLLM.from_vllm_config(config, enable_log_requests=False, disable_log_stats=True)
    engine._llm.input_processor.generation_config_fields = {}
    engine._pauses = EnginePauses(engine._llm)
    return engine, core
