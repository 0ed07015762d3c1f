"""Requests into vLLM's parameters, and what it made out of its outputs."""

from typing import Any

from ebbtide.rollout_worker.engine import EngineRequest


def sampling_params(request: EngineRequest) -> Any:
    """vLLM's parameters for a request: ids and exact logprobs, as they come, and no text."""
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
        ignore_eos=True,  # they are among the stop tokens, where they count
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def logprobs(completion: Any) -> list[float]:
    """One per token: with `logprobs=0` the sampled token's stands first, and alone."""
    flat = completion.logprobs
    return [flat.logprobs[index] for index in flat.start_indices] if flat is not None else []
