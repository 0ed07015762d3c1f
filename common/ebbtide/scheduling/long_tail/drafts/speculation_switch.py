"""Decides whether an engine speculates at all: where drafts do not pay, it does not make any.

The gain is that of the best drafts over none, by learnt acceptance and learnt cost (`draft_lengths`). Both are
uncertain, so the switch has a margin. While it is off nothing is learnt of acceptance, so it tries one step now and
then, more and more seldom while that does not help. A smaller batch makes verification cheaper, which the learnt cost
knows without a try.

Invariant: the fields say whether the switch is on, and when it tries next. Lost with the process: it begins on.
"""

from enum import Enum
from typing import Final

#: It is switched on again only for a gain that forecasts do not make up, and off below one that they do: the best of
#: many noisy counts is hardly ever none.
_WORTH, _WORTHLESS = 1.03, 1.02
#: Off after so many steps in a row without a gain: a single batch says little.
_PATIENCE: Final = 8
#: Steps between tries: at first, and at most. Even tries that double a step cost below 2 % so.
_FIRST_TRY, _LAST_TRY = 64, 4_096


class SpeculationMode(Enum):
    ON = "on"
    OFF = "off"
    TRY = "try"  # for one step, so that acceptance is learnt


class SpeculationSwitch:
    def __init__(self) -> None:
        self._on = True
        self._in_vain = 0  # steps in a row without a gain
        self._every = self._until_try = _FIRST_TRY

    def step(self, gain: float) -> SpeculationMode:
        """What the next step does. `gain`: tokens in a second with the best drafts over those without; 1 if the best
        drafts are none.
        """
        if self._on:
            self._in_vain = self._in_vain + 1 if gain < _WORTHLESS else 0
            if self._in_vain < _PATIENCE:
                return SpeculationMode.ON
            self._on, self._every, self._until_try = False, _FIRST_TRY, _FIRST_TRY
        elif gain >= _WORTH:
            self._on, self._in_vain = True, 0
            return SpeculationMode.ON
        self._until_try -= 1
        if self._until_try > 0:
            return SpeculationMode.OFF
        self._every = min(2 * self._every, _LAST_TRY)
        self._until_try = self._every
        return SpeculationMode.TRY
