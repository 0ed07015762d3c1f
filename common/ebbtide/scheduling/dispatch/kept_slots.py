"""Decides how many free slots of a run's workers are kept for interactive rollouts.

Where all slots are full of batch rollouts, a person waits until one of these ends. A kept slot takes that wait away. It
costs throughput, so slots are kept only while people ask, and only a small part of all.
"""

from typing import Final

#: A person reads an answer, and asks again within about so long.
ASKED_LATELY_S: Final = 120.0
#: At most one in so many slots is kept. Fleets with fewer slots keep none.
_ONE_IN: Final = 8


def kept_slots(total: int, running: int, *, most: int, asked_s: float) -> int:
    """Slots that batch rollouts leave free. `total`: slots of the run's workers; `running`: interactive rollouts in
    them, which have their slots already; `asked_s`: seconds since an interactive rollout was queued.
    """
    if asked_s > ASKED_LATELY_S:
        return 0
    return max(0, min(most, total // _ONE_IN) - running)
