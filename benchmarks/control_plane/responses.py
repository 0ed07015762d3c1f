"""What the scripted workers generate: one response, so that the token at each place of any rollout is known."""

from typing import Final

import numpy as np

from ebbtide.types.tokens import TOKEN_BYTES, pack_tokens

#: No response is longer.
LONGEST: Final = 4096
_WHOLE: Final = pack_tokens(np.arange(LONGEST), np.full(LONGEST, -0.5), 1)


def response(first: int, end: int) -> bytes:
    """Tokens from place `first` to before `end`, packed."""
    return _WHOLE[first * TOKEN_BYTES : end * TOKEN_BYTES]
