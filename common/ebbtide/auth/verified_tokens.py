"""Verifies signed tokens once, and remembers what they claim.

Invariant: only tokens that the present keys verified are remembered. A restart verifies again.
"""

import time
from typing import Final

from ebbtide.auth.role_tokens import SKEW_S, Claims, Keys, verify

#: Tokens to remember: to check a signature takes a tenth of a millisecond. Beyond so many all are verified again.
_MOST: Final = 4096


class VerifiedTokens:
    def __init__(self) -> None:
        self._known: dict[str, Claims] = {}
        self._known_by: Keys | None = None

    def claims(self, token: str, keys: Keys) -> Claims:
        """The claims of a token that one of `keys` signed. Raises `Unauthenticated` for others and expired ones."""
        if keys is not self._known_by or len(self._known) >= _MOST:
            self._known, self._known_by = {}, keys
        claims = self._known.get(token)
        if claims is None or claims.expires + SKEW_S <= time.time():
            claims = self._known[token] = verify(token, keys)
        return claims
