"""Makes digests of requests, by which another request under the same id is recognised."""

from hashlib import blake2b
from typing import Final

import msgspec
from msgspec.structs import replace

from ebbtide.gateway.generation.text_request import ChatPrompt, IdsPrompt, Prompt, TextRequest, VersionWish

_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")
_DIGEST_BYTES: Final = 16


def request_digest(request: TextRequest) -> bytes:
    """A digest of all that decides what a request gets. Its own ids are left out, and so is `fits_context`, which
    decides only whether it is taken.
    """
    asked = replace(request, request_id="", session_id="", group_id="", fits_context=msgspec.UNSET)
    return blake2b(_encoder.encode(asked), digest_size=_DIGEST_BYTES).digest()


def content_digest(request: TextRequest) -> bytes:
    """A digest of what decides the text of a request's completions, but for the encoded prompts, which the rollouts
    have. A repeat may differ in the rest: when it is generated, and whether it is streamed.
    """
    prompts = [_without_text(prompt) for prompt in request.prompts]
    return request_digest(replace(request, prompts=prompts, model="", stream=False, priority=0, versions=VersionWish()))


def _without_text(prompt: Prompt) -> Prompt:
    """A chat's tools and its options for the template decide how a completion is parsed."""
    return replace(prompt, messages=[]) if isinstance(prompt, ChatPrompt) else IdsPrompt([])
