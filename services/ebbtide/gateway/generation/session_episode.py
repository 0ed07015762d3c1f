"""Names the episode of a session's rollouts, by which its turns find the worker that has their prefix."""

import hashlib
from typing import Final

import msgspec

_HASH_BYTES: Final = 16  # two sessions never meet by chance


def session_episode(run_id: str, owner: str, session_id: str) -> str:
    """An id, whatever characters the parts have. The encoding keeps them apart."""
    packed = msgspec.msgpack.encode([run_id, owner, session_id])
    return f"s-{hashlib.blake2b(packed, digest_size=_HASH_BYTES).hexdigest()}"
