"""Decides when unsent tokens are due: those of batch rollouts in bulk, those of interactive ones soon. Pure: callers
pass `now` (seconds, monotonic).

Invariant: the batch lane knows nothing of the interactive one, so batch rollouts keep their times whatever else the
worker generates. While tokens are taken when due, a batch token waits for at most the interval less `lag` (half the
interval if that is more). An interactive token waits for at most its interval; for a quarter of `lag` if that is more,
but never for more than a batch interval. A lane that has nothing to send is due at infinity.
"""

import math
from collections.abc import Callable, Mapping
from typing import Final

from ebbtide.types.fleet import INTERACTIVE_FLUSH_S

#: Random shares of the interval, so that workers do not all flush at the same moment.
JITTER: Final = (0.9, 1.0)
#: A batch rollout's finish, and an attempt's first token, wait this long for others to share the message.
_URGENT_S: Final = 0.02
#: While acknowledgements are late, interactive messages go less often: no more than so many wait for theirs.
_UNANSWERED: Final = 4


class BatchLane:
    """Tokens of batch rollouts. All go by `_due`; the few `_urgent` ones go earlier, in messages of their own, so that
    other tokens still travel in bulk.
    """

    def __init__(self, jitter: Callable[[], float]) -> None:
        """`jitter` returns a factor in (0, 1] for each interval."""
        self._jitter = jitter
        self._due = self._urgent_due = math.inf
        self._urgent: dict[str, None] = {}  # attempt ids, oldest first
        self.interval_s = 0.0

    @property
    def due(self) -> float:
        return min(self._due, self._urgent_due)

    def wait(self, now: float, lag_s: float) -> None:
        """Have new tokens sent so early that they are acknowledged within the interval; `lag_s`: what that takes."""
        if self._due == math.inf:
            spare = max(self.interval_s / 2, self.interval_s - lag_s)
            self._due = now + min(spare, self.interval_s * self._jitter())

    def hurry(self, attempt_id: str, now: float) -> None:
        """Have an attempt's first token, or its finish, sent soon."""
        self._urgent[attempt_id] = None
        self._urgent_due = min(self._urgent_due, now + min(_URGENT_S, self.interval_s))

    def bring_forward(self, now: float) -> None:
        """Make all unsent tokens due."""
        self._due = min(self._due, now)

    def drop(self, attempt_id: str) -> None:
        self._urgent.pop(attempt_id, None)

    def rewind(self) -> None:
        """Forget when unsent tokens were due."""
        self._due = math.inf

    def take(self, now: float) -> tuple[Mapping[str, None], bool]:
        """The urgent attempts to send now, and whether to send all others, too."""
        if self.due > now:
            return {}, False
        whole = self._urgent_due == math.inf or self._due <= now + _URGENT_S
        if whole:
            self._due = math.inf
        urgent, self._urgent, self._urgent_due = self._urgent, {}, math.inf
        return urgent, whole


class InteractiveLane:
    """Tokens of interactive rollouts. The first token of an attempt, a finish, and whatever comes after a pause go at
    once; from then on messages go once in an interval.
    """

    def __init__(self) -> None:
        self.due = math.inf
        self._sent = -math.inf  # when its last message was taken
        self.interval_s = self.longest_s = INTERACTIVE_FLUSH_S  # the latter while acknowledgements are late

    def wait(self, now: float, lag_s: float) -> None:
        """Have new tokens sent with the next message. `lag_s`: usual seconds to an acknowledgement."""
        between_s = max(self.interval_s, min(lag_s / _UNANSWERED, self.longest_s))
        self.due = min(self.due, max(now, self._sent + between_s))

    def hurry(self, _attempt_id: str, now: float) -> None:
        """Have an attempt's first token, or its finish, sent at once."""
        self.bring_forward(now)

    def bring_forward(self, now: float) -> None:
        """Make all unsent tokens due."""
        self.due = min(self.due, now)

    def drop(self, attempt_id: str) -> None: ...

    def rewind(self) -> None:
        """Forget when unsent tokens were due."""
        self.due = math.inf

    def take(self, now: float, *, along: bool) -> bool:
        """Whether to send the unsent tokens now; they go `along` with any other message."""
        if self.due > now and not (along and self.due < math.inf):
            return False
        self.due, self._sent = math.inf, now
        return True


FlushLane = BatchLane | InteractiveLane
