"""Runs vLLM's AsyncLLM as an engine, with weights replaced in place.

Invariant: vLLM itself labels every token with the version whose weights made it; labels change only while generation is
paused and after all layers were replaced. A request with tokens keeps its keys and values over an install; no other
request sees those of older weights: the cache's salt changes with each install, and requests without a token start
again under it. Only this object and its `VersionUpdates` talk to AsyncLLM. If this process dies, by any signal, so do
the engine's own processes.
"""

import asyncio
import json
import logging
import multiprocessing
import os
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from ebbtide import telemetry
from ebbtide.errors import Internal, InvalidRequest
from ebbtide.rollout_worker.engine import (
    EngineFailed,
    EngineRequest,
    Shapes,
    TokenDelta,
    checkpoint_facts,
)
from ebbtide.rollout_worker.engine.measured_steps import EngineCapacity
from ebbtide.rollout_worker.engine.vllm import cpu_build, vllm_plugin
from ebbtide.rollout_worker.engine.vllm.borrowed_engine import BorrowedEngine
from ebbtide.rollout_worker.engine.vllm.drafts.speculation import TREES_MIB, Speculation, speculation_arguments
from ebbtide.rollout_worker.engine.vllm.engine_pauses import CACHE, DEAD, WEIGHTS, EnginePauses
from ebbtide.rollout_worker.engine.vllm.preemption_count import PreemptionCount
from ebbtide.rollout_worker.engine.vllm.vllm_conversions import (
    ENDED,
    device_name,
    engine_capacity,
    logprobs,
    prompt_scores,
    sampling_params,
    token_versions,
)
from ebbtide.rollout_worker.engine.vllm.weights.tensor_boxes import Boxes
from ebbtide.rollout_worker.engine.vllm.weights.version_updates import VersionUpdates
from ebbtide.rollout_worker.settings import VllmSettings
from ebbtide.runtime import Aside
from ebbtide.types.fleet import DraftingState, EngineInfo
from ebbtide.types.rollout import FinishReason
from ebbtide.weights import end_tokens

log = telemetry.get_logger(__name__)

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}

_AWAY = "weights away"
#: vLLM's levels of sleep: weights in the host's memory, or nowhere.
_SLEEP_HOST, _SLEEP_AWAY = 1, 2
_SCHEDULERS = "ebbtide.rollout_worker.engine.vllm.evicting_scheduler"
#: Time for an engine process to end.
_END_S = 10.0


class VllmEngine:
    """Implements `Engine`; see there for what each method promises and raises."""

    def __init__(self, model: str, slots: int, settings: VllmSettings, borrowed: BorrowedEngine | None = None) -> None:
        """`borrowed`: the device is a serving engine's, whose guard says when this one may compute."""
        self._root = checkpoint_facts.check_directory(model)
        self._borrowed = borrowed
        self._slots = slots
        self._settings = settings
        self._shapes: Shapes = {}
        self._salt = 0
        self._away = self._asleep = False
        self._weights_still = asyncio.Condition()  # held by what moves weights or replaces them
        self._tokenizer: Any = None
        self._llm: Any = None
        self._updates: Any = None
        self._pauses: Any = None
        self._preempted: PreemptionCount | None = None
        self._speculation: Speculation | None = None
        self._telling: set[asyncio.Future[None]] = set()  # messages on their way

    @property
    def shapes(self) -> Shapes:
        return self._shapes

    @property
    def boxes(self) -> Boxes | None:
        boxes: Boxes | None = self._updates.boxes
        return boxes

    @property
    def scores_prompts(self) -> bool:
        return True

    @property
    def preemptions(self) -> int:
        return self._preempted.value if self._preempted else 0

    @property
    def speculates(self) -> bool:
        return self._settings.speculation != "off"

    @property
    def drafting(self) -> DraftingState | None:
        return self._speculation.state if self._speculation else None

    @property
    def speculation(self) -> Speculation | None:
        """Its drafts; None before the start, and where it makes none."""
        return self._speculation

    @property
    def capacity(self) -> EngineCapacity:
        """What vLLM settled on. Known after the start."""
        return engine_capacity(self._llm.vllm_config)

    async def start(self, *, aside: bool = False) -> EngineInfo:
        self._shapes = checkpoint_facts.tensor_shapes(self._root)
        info, self._llm = await _starts().do(lambda: self._boot(again=True)) if aside else self._boot()
        dtypes = checkpoint_facts.tensor_dtypes(self._root)
        self._pauses = EnginePauses(self._llm)
        self._updates = await VersionUpdates.learned(self._llm, self._shapes, dtypes)
        if self._borrowed and self._borrowed.sleeps:
            self._borrowed.measured(await self._updates.pool_bytes())
        if self.speculates:
            self._speculation = Speculation(self._llm)
            await self._speculation.start()
        with self._borrowed.warming_up() if self._borrowed else nullcontext():
            await self._warm_up()
        # After the start of the engine's processes: they may be forked, and threads do not survive that.
        self._tokenizer = await asyncio.to_thread(_load_tokenizer, self._root)
        return info

    def _boot(self, *, again: bool = False) -> tuple[EngineInfo, Any]:
        """Returns facts of the engine, and vLLM's object after its processes are up. `again`: after another engine."""
        arguments = self._arguments()
        self._environment()
        if self._borrowed:
            self._borrowed.learn(self._root)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        vllm_plugin.register()
        try:
            config = AsyncEngineArgs(**arguments).create_engine_config()
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"vLLM refuses: {error}", field="vllm") from error
        _evict_ended_first(config.scheduler_config)
        self._preempted = PreemptionCount.made()
        info = self._info(config)
        if again:
            cpu_build.start_by_spawn()
        elif cpu_build.is_cpu_build():
            cpu_build.start_by_fork()
        llm = AsyncLLM.from_vllm_config(config, enable_log_requests=False, disable_log_stats=True)
        # Within `min_tokens` vLLM would bar the checkpoint's end tokens even where a request ignores them.
        llm.input_processor.generation_config_fields = {}
        return self._with_capacity(info, llm.vllm_config), llm

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        made, anew = 0, True
        if self._telling:
            await asyncio.wait(self._telling)  # what was forgotten before makes room for this request
        while anew:
            anew, salt = False, self._salt
            prompt = tokens_input(list(request.token_ids), cache_salt=str(salt))
            stream = self._llm.generate(
                prompt,
                sampling_params(request),
                request.request_id,
                priority=request.priority,
                session_id=request.cache_name or None,
            )
            try:
                async for output in stream:
                    if anew := not made and salt != self._salt:
                        break  # older weights read its prompt, or cached it
                    completion = output.outputs[0]
                    ids = completion.token_ids
                    if not ids and not output.finished:
                        continue
                    versions = token_versions(self._llm.output_processor, request.request_id, completion, made)
                    made += len(ids)
                    scores = prompt_scores(output, request.prompt_logprobs)
                    finish, cached = _REASONS.get(completion.finish_reason), output.num_cached_tokens or 0
                    yield TokenDelta(ids, logprobs(completion), versions, finish, scores, cached)
            except EngineDeadError as error:
                raise EngineFailed(DEAD) from error
            except (VLLMClientError, ValueError) as error:
                raise InvalidRequest(f"vLLM refuses the request: {error}") from error
            except EngineGenerateError as error:
                raise Internal("vLLM could not serve the request; the log says why") from error
            finally:
                await stream.aclose()

    def forget(self, names: Sequence[str]) -> None:
        """Tell the scheduler: see `evicting_scheduler`. A borrowed engine's has no such choice, and ignores it."""
        if self._llm is not None:
            told = self._llm.engine_core.abort_requests_async([ENDED + name for name in names])
            task = asyncio.ensure_future(told)
            self._telling.add(task)
            task.add_done_callback(self._told)

    def _told(self, task: asyncio.Future[None]) -> None:
        """A message that is lost costs room in the cache; `check` finds out if its engine died."""
        self._telling.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("the engine does not know which texts have ended", reason=str(error))

    def decode(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            raise InvalidRequest("needs a tokenizer, which this worker's checkpoint lacks", field="sampling.stop")
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    async def install(self, version: int, weights: Path, changes: Path | None = None) -> float:
        async with self._weights_still:
            await self._weights_still.wait_for(lambda: not self._asleep)
            return await self._install(version, weights, changes)

    async def _install(self, version: int, weights: Path, changes: Path | None) -> float:
        self.check()
        how = await self._updates.prepare(version, weights, None if self._away else changes)
        start = time.monotonic()
        # vLLM's own call waits longer, to no purpose here.
        await self._pauses.hold("install", self._llm.engine_core.pause_scheduler_async)
        self._salt += 1
        sleeping = self._away and not self.by_stages
        try:
            if sleeping:
                await self._pauses.wake(WEIGHTS)
            await self._updates.apply(version, how)
            if self._speculation:
                await self._speculation.install()
            if sleeping:
                await self._pauses.wake(CACHE)
            await self.resume("install")
            if self._away:
                self._away = False
                await self.resume(_AWAY)
            pause_s = time.monotonic() - start
            await self._updates.finish()
        except Exception as error:
            raise EngineFailed(f"version {version} could not be applied whole: {error}") from error
        return pause_s

    @property
    def by_stages(self) -> bool:
        """Whether it gives up its cache first, and its weights then. An engine on a GPU gives both up at once."""
        return self._borrowed is None or not self._borrowed.sleeps

    async def give_up_cache(self) -> None:
        """Free keys and values above the page's limit at once, and all cached ones. Requests keep their tokens. On a
        GPU all keys and values go, and weights move to host memory: installs wait for `wake`. Raises `EngineFailed`."""
        if self.by_stages:
            await self._llm.reset_prefix_cache()
            return
        async with self._weights_still:
            await self._pauses.sleep(_AWAY, _SLEEP_HOST)
            self._asleep = True

    async def wake(self) -> None:
        """Undo `give_up_cache`. Raises `EngineFailed`."""
        if self._asleep:
            async with self._weights_still:
                await self._pauses.wake()
                self._asleep = False
                await self.resume(_AWAY)
                self._weights_still.notify_all()

    async def give_up_weights(self) -> None:
        """Free the weights' memory; on a GPU all of it. Generation stands still until the next install of any version.
        Raises `EngineFailed`."""
        async with self._weights_still:
            self._away = True
            if not self.by_stages:
                await self._pauses.sleep(_AWAY, _SLEEP_AWAY)
                return
            await self.pause(_AWAY)
            try:
                await self._updates.drop()
            except Exception as error:
                raise EngineFailed(f"the weights were given up in part: {error}") from error

    async def pause(self, reason: str) -> None:
        self.check()
        await self._pauses.hold(reason)

    async def resume(self, reason: str) -> None:
        await self._pauses.resume(reason)

    def check(self) -> None:
        if self._llm is not None and self._llm.errored:
            raise EngineFailed(DEAD)

    async def stop(self) -> None:
        """End the engine's processes. They may take seconds, while this process goes on."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        if self._speculation:
            await self._speculation.stop()
            self._speculation = None
        # The readers of its outputs must end before the engine does.
        readers = [task for task in (llm.output_handler, llm.engine_core.resources.output_queue_task) if task]
        for task in readers:
            task.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        await asyncio.to_thread(llm.shutdown)
        if self._preempted is not None:
            self._preempted.remove()
        for process in multiprocessing.active_children():  # a worker that goes on leaves no dead process
            await asyncio.to_thread(process.join, _END_S)

    def _arguments(self) -> dict[str, Any]:
        settings = self._settings
        arguments: dict[str, Any] = {
            "model": str(self._root),
            "dtype": settings.dtype,
            "tensor_parallel_size": settings.tensor_parallel_size,
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "max_model_len": settings.max_model_len or None,
            "max_num_seqs": self._slots,
            "enforce_eager": settings.enforce_eager,
            "kv_cache_memory_bytes": settings.kv_cache_mib << 20 or None,
            # Fixed for rollouts: token ids in and out, exact logprobs of the sampled distribution, lower priorities
            # first, the rollout's sampling and not the checkpoint's, no pickled weights, Ebbtide's weight transfer.
            "skip_tokenizer_init": True,
            "logprobs_mode": "processed_logprobs",
            "scheduling_policy": "priority",
            "generation_config": "vllm",
            "load_format": "safetensors",
            "weight_transfer_config": {"backend": vllm_plugin.BACKEND},
            "worker_extension_cls": vllm_plugin.EXTENSION,
        }
        if cpu_build.is_cpu_build():
            arguments |= cpu_build.engine_arguments(
                settings.threads, settings.tensor_parallel_size, settings.kv_cache_mib
            )
        if self.speculates:
            arguments |= speculation_arguments(self._settings.speculation_tokens, borrowed=self._borrowed is not None)
        arguments |= _extra(settings.engine_args)
        if self._borrowed is None:
            return arguments
        sleep = {} if cpu_build.is_cpu_build() else {"enable_sleep_mode": True}
        return self._borrowed.arguments(arguments) | sleep

    def _environment(self) -> None:
        os.environ["HF_HUB_OFFLINE"] = os.environ["VLLM_NO_USAGE_STATS"] = "1"
        # vLLM's log records go to Ebbtide's log, from its processes too.
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
        logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"))
        os.environ[TREES_MIB] = str(self._settings.speculation_mib)
        vllm_plugin.own_engine_processes()
        if self._borrowed:
            self._borrowed.set_environment()
        if cpu_build.is_cpu_build():
            cpu_build.set_environment(self._settings.threads)

    def _info(self, config: Any) -> EngineInfo:
        model = config.model_config
        return EngineInfo(
            model=self._root.name,
            vocab_size=model.get_vocab_size(),
            max_model_len=model.max_model_len,
            eos_token_ids=end_tokens(self._root),
            architecture=checkpoint_facts.architecture(self._shapes),
        )

    def _with_capacity(self, info: EngineInfo, config: Any) -> EngineInfo:
        """Adds what is known after the start. A borrowed engine's memory is its host's to give and take."""
        capacity, device = engine_capacity(config), device_name(self._settings.tensor_parallel_size)
        if self._borrowed:
            return msgspec.structs.replace(info, device=device)
        return msgspec.structs.replace(
            info,
            device=device,
            kv_tokens=max(0, capacity.kv_tokens),
            kv_block=capacity.kv_block,
            shares_prefixes=capacity.prefix_cache,
        )

    async def _warm_up(self) -> None:
        """Generate one token, so that no rollout waits for the setup that the first request causes."""
        request = EngineRequest(
            request_id="warm-up",
            token_ids=[0],
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_tokens=1,
            min_tokens=0,
            stop_token_ids=(),
        )
        async for _ in self.generate(request):
            pass


@cache
def _starts() -> Aside:
    """The thread that starts engines. They die with it, so it lives as long as the process."""
    return Aside("engine starts")


def _evict_ended_first(config: Any) -> None:
    """Choose the scheduler, unless the engine is borrowed or its operator chose one."""
    if config.scheduler_cls is None:
        name = "EvictingAsyncScheduler" if config.async_scheduling else "EvictingScheduler"
        config.scheduler_cls = f"{_SCHEDULERS}.{name}"


def _load_tokenizer(root: Path) -> Any:
    """The checkpoint's tokenizer, or None if it has none: only stop strings need it. Raises `InvalidRequest`."""
    if not any(root.glob("tokenizer*.json")):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(root, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InvalidRequest(f"its tokenizer cannot be loaded: {error}", field="model") from error


def _extra(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise InvalidRequest(f"is not JSON: {error}", field="vllm.engine_args") from None
    if not isinstance(found, dict):
        raise InvalidRequest("must be a JSON object of vLLM engine arguments", field="vllm.engine_args")
    return found
