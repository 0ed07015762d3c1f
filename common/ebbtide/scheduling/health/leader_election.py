"""Who of several coordinators leads: when the one that waits takes over, and when the one that leads has to doubt it.

The store keeps the lease and counts its time, so that no two clocks are compared. Invariant: who leads believes so for
a shorter time behind its last renewal than the lease lasts, for it counts from before it asked.
"""

from typing import Final

#: How long a lease lasts that is not renewed, and how often it is renewed: three renewals may fail.
TTL_S: Final = 2.0
RENEW_S: Final = 0.5
#: How often who waits looks whether the lease is free.
LOOK_S: Final = 0.2
#: Who waits has to have had answers for so long before it believes that the lease is free: when the store was away, a
#: leader that lives needs the time to reach it again, and to renew.
STEADY_S: Final = TTL_S
#: A pause between answers that is longer was an absence: of the store, or of who looks.
_GAP_S: Final = 1.0


class StandbyWatch:
    """What one that waits has seen of the lease."""

    def __init__(self) -> None:
        self._seen = self._since = float("-inf")

    def free(self, now: float, *, held: bool) -> bool:
        """Whether to take over, having just been told whether the lease is held."""
        if now - self._seen > _GAP_S:
            self._since = now
        self._seen = now
        return not held and now - self._since >= STEADY_S


class LeaderTenure:
    """What one that leads knows of its own lease. `renewed`: when it asked for what it has."""

    def __init__(self, now: float) -> None:
        self.renewed = now

    def rest_s(self, now: float) -> float:
        """For how long it still leads for certain; 0.0 once another may have taken over."""
        return max(0.0, self.renewed + TTL_S - now)

    def patience_s(self, now: float) -> float:
        """How long a renewal may be waited for: until it would be too late, and then until the next is due."""
        return max(self.rest_s(now), RENEW_S)
