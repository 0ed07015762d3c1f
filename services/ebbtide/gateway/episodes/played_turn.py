"""Plays a request of a session: its completions go into the session as they end."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from ebbtide.errors import AlreadyExists
from ebbtide.gateway.decode import ChoiceDelta, ChoiceResult, ChoiceText
from ebbtide.gateway.episodes.completion_reader import completion_of
from ebbtide.gateway.episodes.live_session import LiveSession
from ebbtide.gateway.player import PlayedRequest
from ebbtide.gateway.request import TextRequest
from ebbtide.types.key_usage import MeteredKey
from ebbtide.types.rollout import RolloutRequest
from ebbtide.types.session import SessionState


class PlayedTurn(PlayedRequest):
    """One turn."""

    def __init__(
        self,
        live: LiveSession,
        request: TextRequest,
        rollouts: Sequence[RolloutRequest],
        choices: Sequence[ChoiceText],
        prompt: list[int],
    ) -> None:
        player = live.player
        super().__init__(player.lease, player.threads, request, rollouts, choices, [prompt], live.owner)
        self._live = live

    async def submit(self, key: MeteredKey | None = None) -> None:
        """Raises `AlreadyExists` if the session has ended since the turn was stored."""
        session = self._live.session
        if session is None or session.state is not SessionState.OPEN:
            raise session_ended(self._request.session_id)
        await super().submit(key)

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


def session_ended(name: str) -> AlreadyExists:
    """The error of a request that comes after its session's end."""
    return AlreadyExists(f"X-Session-ID: session {name[:100]!r} has ended; begin another one, under another id")
