"""Estimates the cost of moving a rollout to another worker."""

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
