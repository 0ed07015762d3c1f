"""Makes digests of requests, by which another request under the same id is recognised."""

from hashlib import blake2b
from typing import Final

import msgspec

from ebbtide.gateway.generation.text_request import TextRequest, VersionWish

_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")
_DIGEST_BYTES: Final = 16


def request_digest(request: TextRequest) -> bytes:
    """A digest of all that decides what a request gets. Its own ids are left out."""
    asked = msgspec.structs.replace(request, request_id="", session_id="", group_id="")
    return blake2b(_encoder.encode(asked), digest_size=_DIGEST_BYTES).digest()


def content_digest(request: TextRequest) -> bytes:
    """A digest of what decides the completions of a request, and their text. A repeat may differ in the rest: when it
    is generated, and whether it is streamed.
    """
    return request_digest(msgspec.structs.replace(request, model="", stream=False, priority=0, versions=VersionWish()))
