"""Whether a worker should change to a run of another architecture, for which its engine has to be started anew.

What it wins is the work that it would do there; what it loses is the time of the start, and of the way back, if it has
something to do where it is. A change of weights in place costs a fraction of a second, and is not asked about here.
"""

from math import inf
from typing import Final

from msgspec import Struct

#: A worker that was started anew for a run stays for so many times what that took, while the run has work for it: so no
#: more than a fifth of its time goes into starts.
_STAY: Final = 4.0


class Prospect(Struct, frozen=True, kw_only=True):
    """What a worker finds if it changes. Seconds.

    `change_s`: until it serves; `stay_s`: for how long it would then serve the run; `work_s`: of one worker's work wait
    there; `servers`: workers that serve the run already; `waited_s`: for how long it has had work and none; `busy`:
    whether the worker has something else to do meanwhile.
    """

    change_s: float
    stay_s: float
    work_s: float
    servers: int = 0
    waited_s: float = 0.0
    busy: bool = True


def gain_s(prospect: Prospect) -> float:
    """Seconds of work that the worker would do: its part of what those that serve the run leave until it is there."""
    left = prospect.work_s - prospect.servers * prospect.change_s
    return min(prospect.stay_s, max(0.0, left) / (prospect.servers + 1))


def worth(prospect: Prospect) -> bool:
    """Whether the gain exceeds the cost. Who has waited long gains more: little work would starve otherwise."""
    gain = gain_s(prospect)
    cost = 2 * prospect.change_s if prospect.busy else 0.0
    return gain > 0 and gain + prospect.waited_s > cost


def stay_s(slice_s: float, change_s: float, *, shared: bool) -> float:
    """How long a worker will probably serve a run that it changes to; `shared`: others wait for it too."""
    return max(slice_s, _STAY * change_s) if shared else inf


def settled(since_s: float, change_s: float, *, busy: bool) -> bool:
    """Whether a worker that was started anew so long ago may go on to yet another architecture."""
    return not busy or since_s >= _STAY * change_s
