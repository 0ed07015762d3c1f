"""Conversations of several turns with plain `openai` clients that never try again.

Some clients change their history midway, as agents do: they ask again, edit their last message, or compact it all.

A client's error counts unless its gateway was killed; then it comes back to the other one under its request's id.
"""

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, Final

from msgspec import Struct

from benchmarks.gateway.disturbed_fleet import RUN_ID, DisturbedFleet
from benchmarks.gateway.gateway_plan import GatewayPlan

_WORDS: Final = ("quick", "brown", "fox", "jumps", "lazy", "dog", "sleeps", "search", "weather", "Zürich", "漢字")
#: Conversations get so long to end behind the last kill. One that has not counts as an error.
_PATIENCE_S: Final = 300.0


class AnsweredTurn(Struct, frozen=True, kw_only=True):
    """One turn as its client saw it."""

    session_id: str
    request_id: str
    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    versions: set[int]


class ConversationCrowd:
    """So many conversations at once; a new one begins where one has ended, until `finish`."""

    def __init__(self, fleet: DisturbedFleet, plan: GatewayPlan, random: Random) -> None:
        self._fleet, self._plan, self._random = fleet, plan, random
        self._leaving = False
        self._tasks: list[asyncio.Task[None]] = []
        self.answered: list[AnsweredTurn] = []
        self.errors: list[str] = []
        self.traces: dict[str, Any] = {}
        self.came_back = 0
        self.conversations = 0

    def begin(self) -> None:
        self._tasks = [asyncio.create_task(self._seat(number)) for number in range(self._plan.conversations)]

    async def finish(self) -> None:
        """Let the conversations under way end."""
        self._leaving = True
        _, hung = await asyncio.wait(self._tasks, timeout=_PATIENCE_S)
        self.errors += ["a conversation did not end"] * len(hung)
        for task in hung:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _seat(self, number: int) -> None:
        gateway = list(self._fleet.gateways)[number % len(self._fleet.gateways)]
        while not self._leaving:
            self.conversations += 1
            number, session_id = self.conversations, f"c{self.conversations}"
            gateway = await self._converse(session_id, list(_CHANGES)[number % len(_CHANGES)], gateway)
            if self._fleet.tells_traces:
                self.traces[session_id], gateway = await self._persistent(_trace_of(session_id), gateway)

    async def _converse(self, session_id: str, change: str, gateway: str) -> str:
        """Play one conversation. Returns the gateway that its client speaks to at its end."""
        messages: list[dict[str, Any]] = []
        for number in range(self._plan.turns):
            said = " ".join(self._random.choices(_WORDS, k=8))
            changed = _CHANGES[change](messages, said) if number == self._plan.turns // 2 else messages
            messages = [*changed, {"role": "user", "content": said}] if changed is not None else messages[:-1]
            asked = _Asked(messages, session_id, f"{session_id}-{number}", self._plan.tokens, stream=bool(number % 2))
            answered, gateway = await self._persistent(asked.answer, gateway)
            if answered is None:
                break
            text, turn = answered
            self.answered.append(turn)
            messages.append({"role": "assistant", "content": text})
        return gateway

    async def _persistent(self, work: Callable[[Any], Awaitable[Any]], gateway: str) -> tuple[Any, str]:
        """What `work` answers, or None for an error that counts; and the gateway that the client speaks to now."""
        while True:
            try:
                return await work(self._fleet.gateways[gateway]), gateway
            except Exception as error:  # noqa: BLE001 - whatever a client raises is an error that it sees
                if gateway not in self._fleet.gone:
                    self.errors.append(f"{gateway}: {type(error).__name__}: {error}"[:300])
                    return None, gateway
                self.came_back += 1
                gateway = self._fleet.other(gateway)


def _trace_of(session_id: str) -> Callable[[Any], Awaitable[Any]]:
    """Asks for the trace of a session."""

    async def ask(client: Any) -> Any:
        return await client.get(f"/sessions/{session_id}", cast_to=object)

    return ask


def _compacted(messages: list[dict[str, Any]], said: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": f"Until now {len(messages)} messages: {said}"}]


#: What becomes of the history in the middle of a conversation. None: the last request is sent once more.
_CHANGES: Final[dict[str, Callable[[list[dict[str, Any]], str], list[dict[str, Any]] | None]]] = {
    "none": lambda messages, _: messages,
    "retried": lambda _messages, _: None,
    "edited": lambda messages, _: messages[:-2],
    "compacted": _compacted,
}


class _Asked:
    """One turn's request, the same one however often it is sent."""

    def __init__(
        self, messages: list[dict[str, Any]], session_id: str, request_id: str, tokens: int, *, stream: bool
    ) -> None:
        self._session_id, self._request_id = session_id, request_id
        self._stream = stream
        self._body: dict[str, Any] = {
            "model": RUN_ID,
            "messages": list(messages),
            "max_tokens": tokens,
            "logprobs": True,
            "stream": stream,
            "extra_body": {"return_token_ids": True, "ignore_eos": True},
            "extra_headers": {"X-Session-ID": session_id, "X-Request-ID": request_id},
        }

    async def answer(self, client: Any) -> tuple[str, AnsweredTurn]:
        made: Any = await client.chat.completions.create(**self._body)
        chunks = [chunk async for chunk in made] if self._stream else [made]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        parts = [choice.delta if self._stream else choice.message for choice in choices]
        stamps = [getattr(chunk, f"weight_version_{end}", None) for chunk in chunks for end in ("start", "end")]
        logprobs = [one.logprob for choice in choices if choice.logprobs for one in choice.logprobs.content]
        turn = AnsweredTurn(
            session_id=self._session_id,
            request_id=self._request_id,
            prompt_ids=chunks[0].prompt_token_ids,
            ids=[token for choice in choices for token in choice.token_ids],
            logprobs=logprobs,
            versions={stamp for stamp in stamps if stamp is not None},
        )
        return "".join(part.content or "" for part in parts), turn
