"""Converts requests into vLLM's parameters, and its outputs and configuration into records."""

from typing import Any, Final

from ebbtide.rollout_worker.engine import EngineRequest
from ebbtide.rollout_worker.engine.measured_steps import EngineCapacity

#: Before the name of a text that has ended, in an id that no request has.
ENDED: Final = "ended/"
#: vLLM's label before the first install.
_UNLABELLED: Final = "default"


def sampling_params(request: EngineRequest) -> Any:
    """vLLM's parameters for a request that streams ids and exact logprobs, and no text."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        repetition_penalty=request.repetition_penalty,
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=True,  # the stop tokens include them where they count
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def logprobs(completion: Any) -> list[float]:
    """One per token: with `logprobs=0` only the sampled token's is there."""
    flat = completion.logprobs
    return [flat.logprobs[index] for index in flat.start_indices] if flat is not None else []


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
