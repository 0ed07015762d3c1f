"""What a reclaim means for the rollouts of a borrowed worker: its host may take itself back at any moment, and nobody
but its guard knows for how long.

Most reclaims are over within a second, and to sit through them costs less than to move. So a worker that stands still
keeps its rollouts until waiting for its host will probably cost more than moving them does. What is forecast is not
trusted alone: no reclaim is acted upon at its very beginning, and one that outlasts its forecast refutes it.
"""

from collections.abc import Sequence
from math import exp, inf
from typing import Final

from msgspec import Struct

from ebbtide.scheduling.dispatch.move_costs import COSTS, MoveCosts

#: A reclaim that is over by then moves nothing, whatever was forecast: a forecast that is wrong costs prefills.
SHORT_S: Final = 2.0
#: What is forecast is believed to be at least this share of what the reclaim has lasted already.
_REFUTED: Final = 0.25
#: In so long a time other workers end some of what they have: who waits for room is better off in line by then than
#: tied to one worker.
_LONG_S: Final = 10.0
#: Tokens/s taken for a rollout's while nothing was learnt: it only ranks rollouts among each other.
_UNLEARNT: Final = 30.0


class LentHost(Struct, frozen=True, kw_only=True):
    """A borrowed worker's grant as it stands. `standing`: its host has itself back, and the worker makes no tokens;
    `lasted_s`: for how long it has stood still, or not; `spell_s`: for how long that will probably go on, as its guard
    forecasts; `asleep`: its weights are not on the device.
    """

    standing: bool
    lasted_s: float = 0.0
    spell_s: float = 0.0
    asleep: bool = False

    @property
    def shut(self) -> bool:
        """Whether it gets nothing new: what waits in line goes to whoever is ready first."""
        return self.standing or self.asleep

    @property
    def remains_s(self) -> float:
        """For how long it will probably go on standing still, or working."""
        return max(self.spell_s, _REFUTED * self.lasted_s) if self.standing else self.spell_s


def leaving(lent: LentHost, tokens: Sequence[int], *, room: int, costs: MoveCosts = COSTS) -> list[int]:
    """Which rollouts of a worker are to go elsewhere because its host has itself back, as indices of `tokens`: lengths
    of prompt and response of those that another worker could take. `room`: free places that others have for them.

    Cheapest first while there is room; the others only once the host has been away, or will be, for long.
    """
    if not lent.standing or lent.lasted_s < SHORT_S:
        return []
    order = sorted(range(len(tokens)), key=lambda index: (tokens[index], index))
    long = lent.remains_s >= _LONG_S
    worth = [index for index in order if lent.remains_s > costs.margin * costs.move_s(tokens[index])]
    return worth if long else worth[: max(0, room)]


def interrupted(rest: float, rate: float, spell_s: float) -> float:
    """The chance that a host takes itself back before `rest` more tokens were made at `rate`, if it leaves itself for
    `spell_s` on average. None with a worker that is not borrowed (inf).
    """
    if spell_s == inf:
        return 0.0
    if spell_s <= 0.0:
        return 1.0
    return 1.0 - exp(-rest / ((rate or _UNLEARNT) * spell_s))


def risk_s(tokens: int, rest: float, *, rate: float, spell_s: float, costs: MoveCosts = COSTS) -> float:
    """Seconds that a rollout of `tokens` with `rest` to come will probably lose to a move, if its host takes itself
    back for long. Rises with both: short work and cheap moves risk least.
    """
    return interrupted(rest, rate, spell_s) * costs.move_s(tokens)
