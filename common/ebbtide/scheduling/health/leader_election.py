"""Decides when a standby coordinator takes over, and when the leader must doubt its lease.

The store keeps the lease and counts its time, so that no two clocks are compared. Invariant: a leader's belief ends
before its lease does, because it counts from before it asked for the renewal.
"""

from typing import Final

#: How long a lease lasts, and how often it is renewed: three renewals may fail.
TTL_S: Final = 2.0
RENEW_S: Final = 0.5
#: How often a standby checks the lease.
LOOK_S: Final = 0.2
#: A standby needs answers for so long before it believes that the lease is free: after an absence of the store, a live
#: leader needs time to reach it again and renew.
STEADY_S: Final = TTL_S
#: A longer pause between answers was an absence, of the store or of the standby.
_GAP_S: Final = 1.0


class StandbyWatch:
    """Tracks what a standby sees of the lease."""

    def __init__(self) -> None:
        self._seen = self._since = float("-inf")

    def free(self, now: float, *, held: bool) -> bool:
        """Whether to take over, given the store's answer whether the lease is held."""
        if now - self._seen > _GAP_S:
            self._since = now
        self._seen = now
        return not held and now - self._since >= STEADY_S


class LeaderTenure:
    """Tracks a leader's own lease."""

    def __init__(self, now: float) -> None:
        self.renewed = now  # when it asked for the last renewal that succeeded

    def rest_s(self, now: float) -> float:
        """For how long it certainly still leads; 0.0 once another may have taken over."""
        return max(0.0, self.renewed + TTL_S - now)

    def patience_s(self, now: float) -> float:
        """How long a renewal may take: until the lease ends, and then until the next renewal is due."""
        return max(self.rest_s(now), RENEW_S)
