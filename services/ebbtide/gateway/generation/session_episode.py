"""Names sessions and their groups at the coordinator, where ids are unique in the run.

A session's rollouts have its id for their episode, by which its turns find the worker that has their prefix.
"""

import hashlib
from typing import Final

import msgspec

_HASH_BYTES: Final = 16  # two sessions never meet by chance


def session_episode(run_id: str, owner: str, session_id: str) -> str:
    """An id, whatever characters the parts have. The encoding keeps them apart."""
    return f"s-{_digest(run_id, owner, session_id)}"


def session_group(run_id: str, owner: str, group_id: str) -> str:
    """The id of a client's group. Another owner's group of the same name is another one."""
    return f"g-{_digest(run_id, owner, group_id)}"


def _digest(*parts: str) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(parts), digest_size=_HASH_BYTES).hexdigest()
