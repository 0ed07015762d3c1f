"""Checks requests that have their prompts scored, and reads what came of one.

Scores come whole: one version made all of one prompt's, however many workers tried.
"""

from collections.abc import Sequence
from contextlib import aclosing

from ebbtide.client.gateway_lease import GatewayLease
from ebbtide.errors import InvalidRequest, Unavailable
from ebbtide.gateway.generation.text_request import TextRequest
from ebbtide.types.prompt_scores import check_records
from ebbtide.types.rollout import TokenChunk


def check_scored(request: TextRequest) -> None:
    """Raise `InvalidRequest` naming the field for a request that cannot have its prompts scored as it asks."""
    if request.prompt_logprobs is None:
        return
    if request.session_id:
        raise InvalidRequest("a scored prompt is no turn that could be trained on; leave it out", field="X-Session-ID")
    if request.stream:
        raise InvalidRequest("the scores of a prompt come at once; leave it out", field="stream")
    if request.n != 1:
        raise InvalidRequest("a scored prompt has one completion; leave it out", field="n")
    if request.max_tokens != 1:
        text = "a request that has its prompt scored samples at most one token; ask for one"
        raise InvalidRequest(text, field="max_tokens")


def check_score_count(request: TextRequest, prompts: Sequence[Sequence[int]]) -> None:
    """Raise `InvalidRequest` naming the field for more scores than one answer may have."""
    if request.prompt_logprobs is not None:
        check_records(sum(map(len, prompts)), request.prompt_logprobs, field="prompt_logprobs")


async def whole_response(lease: GatewayLease, rollout_id: str) -> TokenChunk:
    """All that is stored of a rollout, once it has ended. Raises `Unavailable` if its end cannot be told."""
    parts = []
    async with aclosing(lease.tokens(rollout_id)) as chunks:
        async for chunk in chunks:
            parts.append(chunk.tokens)
            if chunk.reason is not None:
                return TokenChunk(offset=0, tokens=b"".join(parts), reason=chunk.reason, message=chunk.message)
    raise Unavailable("the scores ended without a reason; ask again")
