"""A request of a session whose rollouts are submitted. Its completions go into the session as they end."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from ebbtide.gateway.episodes.completion_reader import completion_of
from ebbtide.gateway.episodes.live_session import LiveSession
from ebbtide.gateway.generation.choice_delta import ChoiceDelta, ChoiceResult
from ebbtide.gateway.generation.choice_text import ChoiceText
from ebbtide.gateway.generation.played_request import PlayedRequest
from ebbtide.types.rollout import RolloutRequest


class PlayedTurn(PlayedRequest):
    """One turn."""

    def __init__(
        self,
        live: LiveSession,
        rollouts: Sequence[RolloutRequest],
        choices: Sequence[ChoiceText],
        prompt: list[int],
    ) -> None:
        super().__init__(live.source, rollouts, choices, [prompt])
        self._live = live

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        ids = [rollout.rollout_id for rollout in self._rollouts]
        results = [ChoiceResult(number) for number in range(len(ids))]
        with self._live.answering(ids):
            async with aclosing(super().deltas()) as deltas:
                async for delta in deltas:
                    results[delta.index].add(delta)
                    if delta.finish is not None:  # before the client has it: its next turn repeats it
                        self._live.take(completion_of(ids[delta.index], results[delta.index]))
                    yield delta
