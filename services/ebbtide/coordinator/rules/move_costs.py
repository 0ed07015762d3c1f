"""Estimates what a move costs, weighs it against a reclaim of the host, and compares moves with what they promised."""

from collections.abc import Sequence
from math import exp, inf
from typing import Final

from msgspec import Struct


class MoveCosts(Struct, frozen=True, kw_only=True):
    """The cost of a move, and the gain that justifies one. `prefill` is the learnt tokens/s of the worker that reads; a
    typical one's where it is not known which worker that is; 0.0 if nothing was learnt.
    """

    prefill_tokens_per_s: float = 5_000.0  # of a worker that has read nothing yet
    handover_s: float = 0.5
    margin: float = 1.5  # least gain, in times what is lost
    least_part: float = 0.08  # least gain, in times the time until the step ends, divided by its running rollouts
    advantage: float = 1.3  # least ratio of the rates
    sooner: float = 1.03  # least ratio of the times until a rollout ends: those are known no better
    least_stay_s: float = 10.0  # a rollout stays at its worker for so long
    at_once: int = 32  # most moves in a round

    def read_s(self, tokens: int, prefill: float) -> float:
        """Seconds to read so many tokens."""
        return tokens / (prefill or self.prefill_tokens_per_s)

    def move_s(self, tokens: int, prefill: float) -> float:
        """Seconds without a token for a rollout of so many tokens, prompt and response, while it moves."""
        return self.handover_s + self.read_s(tokens, prefill)


COSTS: Final = MoveCosts()
#: A worker that changes to another run finishes rollouts that end within this, or that would cost as much to move,
_FINISH_S: Final = 1.0
#: but for no longer than this after it was told to change.
_LEAVE_S: Final = 3.0


def finishes_first(*, rest_s: float, length: int, started: bool, waited_s: float, prefill: float) -> bool:
    """Whether a rollout of `length` tokens, with `rest_s` to go, finishes at a worker that another run was given
    `waited_s` ago; else it is handed over. A rollout that has not started loses nothing by that. `prefill`: see
    `MoveCosts`.
    """
    return started and waited_s < _LEAVE_S and rest_s <= max(_FINISH_S, COSTS.move_s(length, prefill))


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

    A host may be reclaimed at any moment, and only its guard can forecast for how long. Most reclaims end within a
    second, and waiting costs less than moving. So a paused worker keeps its rollouts until the wait will probably cost
    more than the moves. The forecast alone is not trusted: no reclaim is acted upon at its very beginning, and one that
    outlasts its forecast refutes it.
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
    costs: MoveCosts = COSTS,
) -> float:
    """Expected seconds that a rollout of `tokens` with `rest` to come loses to a move after a long reclaim. `prefill`:
    see `MoveCosts`.
    """
    return interrupted(rest, rate, spell_s) * costs.move_s(tokens, prefill)


#: Of what was judged before, so much still counts after each further move: some twenty moves decide.
_FADE: Final = 0.95
#: The rule is believed until as much as so many moves was judged,
_NOVICE: Final = 8.0
#: and while recent moves made at least this share of what they promised.
_LEAST: Final = 0.6
#: Otherwise one move is tried this often, to see whether that still holds.
_PROBE_S: Final = 60.0
#: Most moves for each rollout that has finished, and for each that runs: a move costs a hand-over and reading, so it is
#: the exception. Where a second worker joins, nearly half of those that run may go there.
_PER_FINISHED: Final = 0.25
_PER_RUNNING: Final = 0.45


class MoveLedger:
    """Bounds the moves of running rollouts: keeps them few, compares what they promised with what came of them, and
    stops a rule that promises too much.

    A move promises how many tokens its rollout will make on the new engine until the move has paid back: that follows
    from speeds, loads and reading as they were estimated. Then it is compared with what the rollout made. One says
    little, since workers come and go meanwhile; the sums over recent moves decide.

    Invariant: the sums are of the moves judged so far, older ones fading in `_promised` and `_made`. Lost with the
    process: the rule is trusted again until some moves were judged.

    Of one run. Rollouts that ended or were interrupted before their moves could pay back are not judged.
    """

    def __init__(self) -> None:
        self.moves = self.judged = 0
        self.finished = 0  # rollouts of the run meanwhile
        self.promised_tokens = self.made_tokens = 0.0
        self._promised = self._made = self._weight = 0.0
        self._probed = -inf
        self._untold = 0

    @property
    def trusted(self) -> bool:
        """Whether recent moves kept enough of what they promised."""
        return self._weight < _NOVICE or self._made >= _LEAST * self._promised

    @property
    def kept(self) -> float:
        """The share of what recent moves promised that came; 1.0 while none was judged."""
        return self._made / self._promised if self._promised else 1.0

    def allows(self, now: float, *, running: int) -> int:
        """How many rollouts may move now, if so many are `running`."""
        left = max(0, int(_PER_FINISHED * self.finished + _PER_RUNNING * running) - self.moves)
        if self.trusted:
            return left
        return min(1, left) if now - self._probed >= _PROBE_S else 0

    def asked(self, moves: int, now: float) -> None:
        """Note that so many running rollouts were asked back."""
        self.moves += moves
        self._untold += moves
        self._probed = now

    def take_moves(self) -> int:
        """Those since the last call."""
        untold, self._untold = self._untold, 0
        return untold

    def judge(self, promised: float, made: float) -> None:
        """Note how many tokens a rollout should have made since its move, and how many it made."""
        if promised <= 0.0:
            return
        self.judged += 1
        self.promised_tokens += promised
        self.made_tokens += made
        self._promised = _FADE * self._promised + promised
        self._made = _FADE * self._made + made
        self._weight = _FADE * self._weight + 1.0
