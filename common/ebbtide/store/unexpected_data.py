"""Names what a store call raises for data that makes no sense. It stands apart from the client library, which not all
who must let such errors pass have.
"""

from typing import Final

import msgspec

from ebbtide.errors import Internal

#: What a call raises for data of one run that the store or this program cannot make sense of.
UNEXPECTED: Final = (Internal, msgspec.MsgspecError)
