"""Derives ids of rollouts from who asked for them, so that a repeated request meets its rollouts again."""

import hashlib
from typing import Final

import msgspec
from msgspec import Struct

_HASH_BYTES: Final = 16  # two requests never meet by chance


class RequestIdentity(Struct, frozen=True, kw_only=True):
    """What makes a request the same as an earlier one."""

    run_id: str
    owner: str
    session_id: str
    request_id: str

    @property
    def digest(self) -> str:
        """32 hexadecimal digits. The encoding keeps the parts apart, whatever characters they have."""
        packed = msgspec.msgpack.encode([self.run_id, self.owner, self.session_id, self.request_id])
        return hashlib.blake2b(packed, digest_size=_HASH_BYTES).hexdigest()

    def rollout_ids(self, count: int) -> list[str]:
        digest = self.digest
        return [f"q-{digest}-{number}" for number in range(count)]

    def episode_id(self) -> str:
        """By what turns of one session find the worker that has their prefix. A request alone is its own episode."""
        if not self.session_id:
            return f"q-{self.digest}"
        packed = msgspec.msgpack.encode([self.run_id, self.owner, self.session_id])
        return f"s-{hashlib.blake2b(packed, digest_size=_HASH_BYTES).hexdigest()}"
