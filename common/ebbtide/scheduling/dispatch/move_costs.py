"""What it costs to take a rollout from one worker and give it to another."""

from typing import Final

from msgspec import Struct


class MoveCosts(Struct, frozen=True, kw_only=True):
    """What a move costs, and how sure its gain must be: `margin` times the cost, at a rate higher by `advantage`, for
    a rollout that has been with its worker for `settled_s`; at most `at_once` moves in a round.
    """

    prefill_tokens_per_s: float = 5_000.0
    handover_s: float = 0.5
    margin: float = 1.5
    advantage: float = 1.15
    settled_s: float = 10.0
    at_once: int = 32

    def move_s(self, tokens: int) -> float:
        """Seconds that a rollout of so many tokens, prompt and response, makes none while it moves."""
        return self.handover_s + tokens / self.prefill_tokens_per_s


COSTS: Final = MoveCosts()


#: A worker that goes over to another run ends what it will have ended by then, or what costs as much to move.
_FINISH_S: Final = 1.0
#: But no longer than this after it was told to go over.
_LEAVE_S: Final = 3.0


def finishes_first(*, rest_s: float, length: int, started: bool, waited_s: float) -> bool:
    """Whether a rollout of `length` tokens ends where it is, in `rest_s`, though its worker has been asked for by
    another run `waited_s` ago; else it is handed over. What has not started loses nothing by that.
    """
    return started and waited_s < _LEAVE_S and rest_s <= max(_FINISH_S, COSTS.move_s(length))
