"""Runs vLLM's AsyncLLM as an engine, with weights replaced in place.

Invariant: vLLM itself labels every token with the version whose weights made it; labels change only while generation is
paused and after all layers were replaced. A request with tokens keeps its keys and values over an install; no other
request sees those of older weights: the cache's salt changes with each install, and requests without a token start
again under it. Only this module and its `VersionUpdates` talk to AsyncLLM, and `request_outputs` reads its output
processor. If this process dies, by any signal, so do the engine's own processes.
"""

import asyncio
import json
import logging
import multiprocessing
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from ebbtide import telemetry
from ebbtide.errors import Internal, InvalidRequest
from ebbtide.hub_models import model_name
from ebbtide.rollout_worker.engine import (
    Boxes,
    EngineCapacity,
    EngineFailed,
    EngineRequest,
    Shapes,
    TokenDelta,
    checkpoint_facts,
)
from ebbtide.rollout_worker.engine.vllm import cpu_build, vllm_plugin
from ebbtide.rollout_worker.engine.vllm.borrowed_engine import BorrowedEngine, device_bytes
from ebbtide.rollout_worker.engine.vllm.kv_cache import ENDED, PreemptionCount
from ebbtide.rollout_worker.engine.vllm.request_outputs import (
    deliver_held,
    logprobs,
    prompt_scores,
    request_states,
    sampling_params,
    token_versions,
    unread_tokens,
)
from ebbtide.rollout_worker.engine.vllm.speculation import TREES_MIB, Speculation, speculation_arguments
from ebbtide.rollout_worker.engine.vllm.version_updates import VersionUpdates
from ebbtide.rollout_worker.settings import BATCHED_TOKENS, VllmSettings
from ebbtide.runtime import Aside
from ebbtide.types.fleet import DraftingState, EngineInfo
from ebbtide.types.ids import shortened
from ebbtide.types.rollout import FinishReason
from ebbtide.weights import end_tokens

log = telemetry.get_logger(__name__)

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}

_AWAY, _CACHELESS = "weights away", "cache away"
#: vLLM's levels of sleep: weights in the host's memory, or nowhere.
_SLEEP_HOST, _SLEEP_AWAY = 1, 2
_SCHEDULERS = "ebbtide.rollout_worker.engine.vllm.schedulers"
#: Attempts to release a cache, and the time between two.
_TRIES, _CLEARED_S = 20, 0.05
#: Time for an engine process to end.
_END_S = 10.0

DEAD: Final = "the engine's process died; its log says why"
#: Memory that vLLM gives back in sleep, by its names.
WEIGHTS, CACHE = "weights", "kv_cache"


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
        self._away = self._asleep = self._cacheless = False
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
        self.set_environment()
        if self._borrowed:
            self._borrowed.learn(self._root, self._settings)
        arguments = self._arguments()
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
                if rest := unread_tokens(self._llm.output_processor, request.request_id, made):
                    yield rest  # the error took the place of what was not read yet
                raise EngineFailed(DEAD) from error
            except (VLLMClientError, ValueError) as error:
                raise InvalidRequest(f"vLLM refuses the request: {error}") from error
            except EngineGenerateError as error:
                raise Internal("vLLM could not serve the request; the log says why") from error
            finally:
                await stream.aclose()

    def deliver(self, request_id: str | None = None) -> None:
        if self._llm is None:
            return
        states = request_states(self._llm.output_processor, request_id)
        for state in states:
            deliver_held(state)
        if request_id is not None:
            for state in states:
                state.stream_interval = 1

    def forget(self, names: Sequence[str]) -> None:
        """Tell the scheduler: see `schedulers`. A borrowed engine's has no such choice, and ignores it."""
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
                if sleeping:
                    await self._cache_is_back()
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
                await self._cache_is_back()
                self._weights_still.notify_all()

    async def release_cache(self) -> None:
        """Give the memory of all keys and values back to the device; weights stay, and installs go on. Requests keep
        their tokens, and wait for `take_cache`. Nothing changes while weights are away or asleep; on CPUs the memory of
        what a budget takes goes back by itself. Raises `EngineFailed`."""
        if self.by_stages or self._cacheless:
            return
        async with self._weights_still:
            if not self._asleep and not self._away:
                await self._pauses.release_cache(_CACHELESS)
                self._cacheless = True

    async def take_cache(self) -> None:
        """Undo `release_cache`: keys and values are computed again. Raises `EngineFailed`."""
        if self.by_stages or not self._cacheless:
            return  # without waiting for an install that has the weights
        async with self._weights_still:
            if self._cacheless and not self._asleep and not self._away:
                await self._pauses.wake(CACHE)
                await self._cache_is_back()

    async def _cache_is_back(self) -> None:
        if self._cacheless:
            self._cacheless = False
            await self.resume(_CACHELESS)

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
        elif self._borrowed is None:
            arguments["max_num_batched_tokens"] = max(BATCHED_TOKENS, self._slots)
        else:
            arguments["gpu_memory_utilization"] = self._borrowed.memory_share(device_bytes())
        if self.speculates:
            arguments |= speculation_arguments(self._settings.speculation_tokens, borrowed=self._borrowed is not None)
        arguments |= _extra(settings.engine_args)
        if self._borrowed is None:
            return arguments
        sleep = {} if cpu_build.is_cpu_build() else {"enable_sleep_mode": True}
        return self._borrowed.arguments(arguments) | sleep

    def set_environment(self) -> None:
        """Prepare this process and the engine's. Must come before vLLM and torch are imported, which read this then."""
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
            model=model_name(str(self._root)),
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
    if "stream_interval" in found:
        raise InvalidRequest(
            "stream_interval would hold back the tokens of all requests, also where somebody waits for each: set the "
            "worker's own stream_interval",
            field="vllm.engine_args",
        )
    return found


class EnginePauses:
    """Counts the reasons why an engine stands still, and puts it to sleep and wakes it by vLLM's sleep mode.

    vLLM knows only whether it is paused, and waking resumes it. So this object pauses it again while there is a reason.

    Invariant: the engine generates only while there is no reason to pause. While its memory is away, there is one.
    """

    def __init__(self, llm: Any) -> None:
        """`llm`: vLLM's AsyncLLM."""
        self._llm = llm
        self._reasons: set[str] = set()
        self._one = asyncio.Lock()

    async def hold(self, reason: str, stop: Callable[..., Awaitable[None]] | None = None) -> None:
        """Pause, unless something paused the engine before. `stop`: the call that does it; None: vLLM's usual one.
        Raises `EngineFailed`."""
        async with self._one:
            if not self._reasons:
                try:
                    await (stop or self._llm.pause_generation)(mode="keep", clear_cache=False)
                except Exception as error:
                    if self._llm.errored:
                        raise EngineFailed(DEAD) from error
                    raise
            self._reasons.add(reason)

    async def resume(self, reason: str) -> None:
        async with self._one:
            if self._reasons == {reason}:
                await self._llm.resume_generation()
            self._reasons.discard(reason)

    async def sleep(self, reason: str, level: int) -> None:
        """Pause, and give the device's memory back: at level 1 weights go to the host's memory, at level 2 nowhere.
        Requests keep their tokens. Raises `EngineFailed`."""
        async with self._one:
            self._reasons.add(reason)
            await _whole("it did not give its memory back", self._llm.sleep(level=level, mode="keep"))

    async def release_cache(self, reason: str) -> None:
        """Pause, and give the memory of keys and values alone back. Raises `EngineFailed`."""
        await self.hold(reason)
        for left in reversed(range(_TRIES)):
            try:
                await self._llm.release_kv_cache_memory()
            except Exception as error:
                # vLLM refuses while it still clears away what ended after the pause.
                if self._llm.errored or not left:
                    raise EngineFailed(f"it did not give its cache's memory back: {error}") from error
                await asyncio.sleep(_CLEARED_S)
            else:
                return

    async def wake(self, *memory: str) -> None:
        """Take these kinds of memory again, without anything: all. The reason to sleep stays. Raises
        `EngineFailed`."""
        async with self._one:
            await _whole("it did not get its memory back", self._llm.wake_up(list(memory) or None))
            if WEIGHTS not in memory:  # vLLM generates again once nothing is away
                await self._llm.pause_generation(mode="keep", clear_cache=False)


async def _whole(failure: str, call: Awaitable[Any]) -> None:
    try:
        await call
    except Exception as error:
        raise EngineFailed(f"{failure}: {error}") from error


def engine_capacity(config: Any) -> EngineCapacity:
    """What vLLM's configuration says after the start of its processes, which find how much memory is left."""
    cache, scheduler = config.cache_config, config.scheduler_config
    return EngineCapacity(
        kv_tokens=(cache.num_gpu_blocks - 1) * cache.block_size,  # one block stands for "no block"
        kv_block=cache.block_size,
        batched_tokens=scheduler.max_num_batched_tokens,
        sequences=scheduler.max_num_seqs,
        prefix_cache=bool(cache.enable_prefix_caching),
        whole_prompt_fits=bool(scheduler.scheduler_reserve_full_isl),
    )


def device_name(devices: int) -> str:
    """What an engine on so many devices runs on. Empty on CPUs: how fast they are hangs on threads and neighbours."""
    from vllm.platforms import current_platform

    return "" if current_platform.is_cpu() else shortened(f"{devices} x {current_platform.get_device_name()}", 128)
