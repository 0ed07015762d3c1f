"""Names what a store call raises for data that makes no sense, and for writes that the store does not take now. It
stands apart from the client library, which not all who must let such errors pass have.
"""

from typing import Final

import msgspec

from ebbtide.errors import Internal, StoreUnavailable

#: What a call raises for data of one run that the store or this program cannot make sense of.
UNEXPECTED: Final = (Internal, msgspec.MsgspecError)


class WritesRefused(StoreUnavailable):
    """The store answered that it takes no writes for now: nothing was done. Callers of services see its base."""
