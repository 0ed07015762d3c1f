"""What vLLM is asked of each request, and what it gives: tokens with logprobs and versions, scores of prompts.

vLLM's output processor, which lives in this process, holds tokens back where a request says so (`stream_interval`);
here they are fetched before their time. This reads the state that vLLM 0.32 keeps of each request.
"""

import math
from types import SimpleNamespace
from typing import Any, Final

from msgspec import to_builtins

from ebbtide.errors import Internal
from ebbtide.rollout_worker.engine import EngineRequest, TokenDelta
from ebbtide.rollout_worker.engine.vllm.speculation import DRAFTS
from ebbtide.types.tokens import ScoreArray, score_places

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
        stream_interval=request.stream_interval,
        extra_args=None if request.drafts is None else {DRAFTS: to_builtins(request.drafts)},
    )


def logprobs(completion: Any) -> list[float]:
    """One per token: the sampled token's is the first at its place. NaN where the request asked for none."""
    flat = completion.logprobs
    if flat is None:
        return [math.nan] * len(completion.token_ids)
    if len(flat.logprobs) == len(flat.start_indices):  # of nothing but the sampled tokens
        found: list[float] = flat.logprobs
        return found
    return [flat.logprobs[at] for at in flat.start_indices]


def request_states(processor: Any, request_id: str | None) -> list[Any]:
    """What vLLM's output processor keeps of this request, if it knows it; None: of all."""
    states = processor.request_states
    if request_id is None:
        return list(states.values())
    return [states[name] for name in processor.external_req_ids.get(request_id, ()) if name in states]


def deliver_held(state: Any) -> None:
    """Give a request's reader the tokens that vLLM keeps until there are `stream_interval`: never the first one."""
    ids, sent, interval = state.detokenizer.output_token_ids, state.sent_tokens_offset, state.stream_interval
    if interval == 1 or not 0 < sent < len(ids):
        return
    state.stream_interval = 1  # an output with all of these, by vLLM's own code
    try:
        output = state.make_request_output(ids[sent:], None, None, None)
    finally:
        state.stream_interval = interval
    state.sent_tokens_offset = len(ids)
    state.queue.put(output)


def unread_tokens(processor: Any, request_id: str, made: int) -> TokenDelta | None:
    """The tokens of a request behind the first `made`; None if its reader has all that came from the core."""
    for state in request_states(processor, request_id):
        ids = state.detokenizer.output_token_ids[made:]
        if ids and made:
            completion = SimpleNamespace(
                token_ids=ids, logprobs=state.logprobs_processor.logprobs, weight_versions=None
            )
            versions = token_versions(processor, request_id, completion, made)
            return TokenDelta(ids, logprobs(completion)[-len(ids) :], versions)
    return None


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
    if starts and starts[-1][1] <= start:  # the usual case
        return [_version(starts[-1][0])] * count
    versions, newest = [0] * count, start + count
    for label, since in reversed(starts):
        first = max(since, start)
        for index in range(first - start, newest - start):
            versions[index] = _version(label)
        newest = min(newest, first)
    return versions


def _version(label: str) -> int:
    return 0 if label == _UNLABELLED else int(label)
