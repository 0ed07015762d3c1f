"""Reads one completion of a session from the coordinator: its tokens, and the answer that its client got."""

from contextlib import aclosing
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ebbtide.errors import NotFound
from ebbtide.gateway.decode import ChoiceResult, ChoiceText
from ebbtide.gateway.player import UNDELIVERED, RequestPlayer, pushed
from ebbtide.gateway.request import TextRequest
from ebbtide.types.rollout import FinishReason
from ebbtide.types.tokens import TokenArray, unpack_tokens


class ReadCompletion(Struct, frozen=True, kw_only=True):
    """A completion that gets no more tokens."""

    rollout_id: str
    tokens: TokenArray  # those that count: up to the one that completed a stop string
    answers: tuple[dict[str, Any], ...] = ()  # as its client got it; none if it was cut short
    truncated: bool = False  # ended by its length
    undelivered: bool = False  # it was ended because nobody would get its answer
    absent: bool = False  # not submitted by now: its gateway is about to, or died


def completion_of(rollout_id: str, result: ChoiceResult, *further: ChoiceResult) -> ReadCompletion:
    """The completion of a result. `further`: the same tokens, parsed as another kind of answer shows them."""
    finish = result.finish
    return ReadCompletion(
        rollout_id=rollout_id,
        tokens=result.tokens,
        answers=tuple(map(_message, (result, *further))) if finish else (),
        truncated=bool(finish and finish.reason == "length"),
    )


async def read_completion(
    player: RequestPlayer, request: TextRequest, rollout_id: str, prompt_ids: list[int], owner: str
) -> ReadCompletion:
    """Follow a rollout to its end. `owner`: for whom its text is parsed."""
    # A stream's parser may split a response otherwise than the parser of whole ones.
    kinds = [replace(request, stream=stream) for stream in sorted({False, request.stream})]

    def work() -> list[ChoiceText]:
        return [player.choice(kind, 0, rollout_id, prompt_ids) for kind in kinds]

    choices = await player.threads.run(owner, work, refusable=False)
    results, undelivered = [ChoiceResult(0) for _ in choices], False
    try:
        async with aclosing(player.lease.tokens(rollout_id)) as chunks:
            async for chunk in chunks:
                ends = chunk.reason in (FinishReason.STOP, FinishReason.LENGTH)
                for choice, result in zip(choices, results, strict=True):
                    reason = chunk.reason if ends else None
                    result.add(await pushed(choice, unpack_tokens(chunk.tokens), reason, player.threads, owner))
                if choices[0].finished or chunk.reason is not None:
                    undelivered = chunk.reason is FinishReason.CANCELLED and chunk.message == UNDELIVERED
                    break
    except NotFound:
        return ReadCompletion(rollout_id=rollout_id, tokens=results[0].tokens, absent=True)
    return replace(completion_of(rollout_id, *results), undelivered=undelivered)


def _message(result: ChoiceResult) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": result.text}
    if result.reasoning:
        message["reasoning"] = result.reasoning
    if result.calls:
        message["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in result.calls
        ]
    return message
