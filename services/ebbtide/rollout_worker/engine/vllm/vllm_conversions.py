"""Converts requests into vLLM's parameters, and its outputs and configuration into records."""

import math
from typing import Any, Final

from msgspec import to_builtins

from ebbtide.errors import Internal
from ebbtide.rollout_worker.engine import EngineRequest
from ebbtide.rollout_worker.engine.measured_steps import EngineCapacity
from ebbtide.types.prompt_scores import ScoreArray, score_places
from ebbtide.types.text_bounds import shortened

#: Before the name of a text that has ended, in an id that no request has.
ENDED: Final = "ended/"
#: Name of a request's `DraftSource` among its extra arguments, on the way to the proposer in the engine's process.
DRAFTS: Final = "ebbtide_drafts"
#: vLLM's label before the first install.
_UNLABELLED: Final = "default"


def sampling_params(request: EngineRequest) -> Any:
    """vLLM's parameters for a request that streams ids and, if asked, exact logprobs, and no text."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=True,  # the stop tokens include them where they count
        logprobs=request.prompt_logprobs or (0 if request.logprobs else None),
        prompt_logprobs=request.prompt_logprobs,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=None if request.drafts is None else {DRAFTS: to_builtins(request.drafts)},
    )


def logprobs(completion: Any) -> list[float]:
    """One per token: the sampled token's is the first at its place. NaN where the request asked for none."""
    flat = completion.logprobs
    return [math.nan] * len(completion.token_ids) if flat is None else [flat.logprobs[at] for at in flat.start_indices]


def prompt_scores(output: Any, alternatives: int | None) -> ScoreArray | None:
    """The scores in the first output of a request that asked for them. Raises `Internal` if vLLM gave others."""
    if alternatives is None:
        return None
    behind, sampled = output.prompt_logprobs, output.outputs[0].logprobs  # vLLM gives nothing at the first token
    if behind is None or sampled is None or len(behind.logprobs) % (1 + alternatives):
        raise Internal("vLLM did not score the prompt as it was asked to")
    return score_places(
        [*behind.token_ids, *sampled.token_ids],
        [*behind.logprobs, *sampled.logprobs],
        [*behind.ranks, *sampled.ranks],
        alternatives,
    )


def token_versions(processor: Any, request_id: str, completion: Any, start: int) -> list[int]:
    """The version of each token of the completion, the first of which is the request's token `start`.

    vLLM labels a request's outputs as they arrive, but shows the labels only with the last one: until then they are
    read from its output processor.
    """
    count = len(completion.token_ids)
    if completion.weight_versions is not None:
        starts = [(span.version, span.start) for span in completion.weight_versions]
    else:
        internal = processor.external_req_ids[request_id][0]
        starts = processor.request_states[internal].weight_version_starts
    versions, newest = [0] * count, start + count
    for label, since in reversed(starts):
        first = max(since, start)
        for index in range(first - start, newest - start):
            versions[index] = 0 if label == _UNLABELLED else int(label)
        newest = min(newest, first)
    return versions


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
