"""Weighs a reclaim of a borrowed worker's host against moving its rollouts. The host may be reclaimed at any moment,
and only its guard can forecast for how long.

Most reclaims end within a second, and waiting costs less than moving. So a paused worker keeps its rollouts until the
wait will probably cost more than the moves. The forecast alone is not trusted: no reclaim is acted upon at its very
beginning, and one that outlasts its forecast refutes it.
"""

from collections.abc import Sequence
from math import exp, inf
from typing import Final

from msgspec import Struct

from ebbtide.scheduling.dispatch.move_costs import COSTS, MoveCosts

#: A shorter reclaim moves nothing, whatever was forecast: a wrong forecast costs prefills.
SHORT_S: Final = 2.0
#: A reclaim is believed to last at least this share of its time so far.
_REFUTED: Final = 0.25
#: Other workers finish rollouts in so long a time: a rollout does better in the queue than tied to a paused worker.
_LONG_S: Final = 10.0
#: Tokens/s assumed of a rollout while nothing was learnt: it only ranks rollouts.
_UNLEARNT: Final = 30.0


class LentHost(Struct, frozen=True, kw_only=True):
    """The state of a borrowed worker's grant."""

    reclaimed: bool  # its host serves users now, and the worker makes no tokens
    lasted_s: float = 0.0  # since it was last reclaimed or granted
    spell_s: float = 0.0  # for how long that will probably last, as its guard forecasts
    asleep: bool = False  # its weights are not on the device
    hand_over: bool = False  # its lender waits for what it runs to go on elsewhere

    @property
    def shut(self) -> bool:
        """Whether it gets no rollouts."""
        return self.reclaimed or self.asleep

    @property
    def ripe(self) -> bool:
        """Whether it may lose rollouts: its host was reclaimed, and that is no short spell."""
        return self.reclaimed and (self.hand_over or self.lasted_s >= SHORT_S)

    @property
    def remains_s(self) -> float:
        """For how long it will probably stay reclaimed, or granted."""
        return max(self.spell_s, _REFUTED * self.lasted_s) if self.reclaimed else self.spell_s


def leaving(lent: LentHost, tokens: Sequence[int], *, room: int, prefill: float, costs: MoveCosts = COSTS) -> list[int]:
    """The rollouts to take from a worker whose host was reclaimed, as indices of `tokens`: the lengths of prompt and
    response of those that another worker could take. `room`: free places of others; `prefill`: see `MoveCosts`.

    The cheapest leave first while there is room; the others only if the reclaim lasts, or will last, for long. All
    leave at once if the lender asked for it: it keeps the device until they have ended elsewhere.
    """
    if not lent.ripe:
        return []
    order = sorted(range(len(tokens)), key=lambda index: (tokens[index], index))
    if lent.hand_over:
        return order
    long = lent.remains_s >= _LONG_S
    worth = [index for index in order if lent.remains_s > costs.margin * costs.move_s(tokens[index], prefill)]
    return worth if long else worth[: max(0, room)]


def interrupted(rest: float, rate: float, spell_s: float) -> float:
    """The chance of a reclaim before `rest` tokens are made at `rate`, if a grant lasts `spell_s` on average."""
    if spell_s == inf:
        return 0.0
    if spell_s <= 0.0:
        return 1.0
    return 1.0 - exp(-rest / ((rate or _UNLEARNT) * spell_s))


def risk_s(
    tokens: int,
    rest: float,
    *,
    rate: float,
    spell_s: float,
    prefill: float,
    found_s: float = 0.0,
    costs: MoveCosts = COSTS,
) -> float:
    """Expected seconds that a rollout of `tokens` with `rest` to come loses to a move after a long reclaim, or after a
    loss of its worker that is found `found_s` later. `prefill`: see `MoveCosts`.
    """
    return interrupted(rest, rate, spell_s) * (found_s + costs.move_s(tokens, prefill))
