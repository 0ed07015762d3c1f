"""Follows the rollouts of one request, and yields what is new of its completions.

Invariant: each completion's tokens are read by one task at most, and a completion that is ahead of the answer waits
once its queue is full, so that a slow client costs no memory. The rollouts are the coordinator's: when the gateway
dies, they go on, and a repeat of the request meets them. A submit that has begun is followed to its end, whoever
leaves meanwhile: a cancel that overtook it would end nothing.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

import msgspec

from ebbtide.client.gateway_lease import GatewayLease
from ebbtide.errors import AlreadyExists, EbbtideError, Internal, NoCapacity, RateLimited, Unavailable
from ebbtide.gateway.generation.choice_delta import ChoiceDelta
from ebbtide.gateway.generation.choice_text import ChoiceText
from ebbtide.gateway.generation.prompt_threads import PromptThreads
from ebbtide.gateway.generation.request_fields import named_as_asked
from ebbtide.gateway.generation.scored_requests import whole_response
from ebbtide.gateway.generation.text_request import TextRequest
from ebbtide.types.key_usage import MeteredKey
from ebbtide.types.prompt_scores import unpack_scores
from ebbtide.types.rollout import FinishReason, RolloutRequest, TokenChunk
from ebbtide.types.tokens import TokenArray, unpack_tokens

#: Deltas of one request that wait for its client.
_AHEAD: Final = 16
#: A request waits so long for room at the coordinator.
_ROOM_S: Final = 10.0
#: A rollout is cancelled within so long after its stop string, or goes on to its end.
_STOP_S: Final = 10.0
#: Why a rollout was cancelled whose answer nobody gets.
UNDELIVERED: Final = "undelivered"


class PlayedRequest:
    """A request whose rollouts are known. It is submitted first; then `deltas` is read once. Its prompts' contents are
    not needed any more.
    """

    def __init__(
        self,
        lease: GatewayLease,
        threads: PromptThreads,
        request: TextRequest,
        rollouts: Sequence[RolloutRequest],
        choices: Sequence[ChoiceText],
        prompts: Sequence[list[int]],
        owner: str,
    ) -> None:
        """`threads`: in which whole texts are parsed, for `owner`."""
        self._threads, self._owner = threads, owner
        self._lease, self._request, self._rollouts, self._choices = lease, request, rollouts, choices
        self.prompts = prompts  # token ids; each has an equal number of completions, in order
        self.run_id = lease.run.run_id
        self._submission: asyncio.Task[None] | None = None
        self._stops: set[asyncio.Task[None]] = set()

    @property
    def completions(self) -> int:
        return len(self._rollouts)

    def prompt_of(self, index: int) -> list[int]:
        """The prompt of a completion."""
        return self.prompts[index * len(self.prompts) // self.completions]

    async def submit(self, key: MeteredKey | None = None) -> None:
        """Queue the rollouts. Known ones change nothing. Returns, or is cancelled, only once none arrives any more.
        `key`: of the client, if it has limits.

        Raises `InvalidRequest` naming the client's field, `AlreadyExists` for the id of another request, and
        `NoCapacity` if there is no room.
        """
        self._submission = task = asyncio.create_task(self._queue(key))
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # its client has left
            raise
        task.result()

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Yield deltas of all completions as they come. Each completion's last one has a finish.

        Raises `Unavailable` if a rollout was cancelled by another, `Internal` if it was given up.
        """
        if self.completions == 1:
            async with aclosing(self._follow(0)) as following:
                async for delta in following:
                    yield delta
            return
        async with aclosing(self._joined()) as joined:
            async for delta in joined:
                yield delta

    async def cancel(self) -> None:
        """End the rollouts that still run, also those that are being submitted: nobody gets their answer."""
        if self._submission is None:
            return
        await asyncio.wait({self._submission})
        await self._lease.cancel_rollouts([rollout.rollout_id for rollout in self._unfinished()], UNDELIVERED)

    async def _queue(self, key: MeteredKey | None) -> None:
        try:
            with named_as_asked(self._request):
                await self._find_room(key)
        except AlreadyExists:
            raise AlreadyExists("X-Request-ID: another request has this id; choose another one") from None

    async def _find_room(self, key: MeteredKey | None) -> None:
        """Submit, and wait a while for room in the run's queue or quota. Then the client is told, and may wait."""
        ends = time.monotonic() + _ROOM_S
        while True:
            try:
                await self._lease.submit_rollouts(self._rollouts, wait=False, key=key)
            except NoCapacity as error:
                if isinstance(error, RateLimited) or time.monotonic() + error.retry_after_s > ends:
                    raise
                await asyncio.sleep(error.retry_after_s)
            else:
                return

    def _unfinished(self) -> list[RolloutRequest]:
        return [one for one, choice in zip(self._rollouts, self._choices, strict=True) if not choice.finished]

    async def _joined(self) -> AsyncGenerator[ChoiceDelta, None]:
        queue: asyncio.Queue[ChoiceDelta | EbbtideError | None] = asyncio.Queue(_AHEAD)
        tasks = [asyncio.create_task(self._enqueue(number, queue)) for number in range(self.completions)]
        try:
            under_way = len(tasks)
            while under_way:
                item = await queue.get()
                if isinstance(item, EbbtideError):
                    raise item
                if item is None:
                    under_way -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            while not queue.empty():  # an error in it refers to the frame that refers to the queue
                queue.get_nowait()

    async def _enqueue(self, number: int, queue: "asyncio.Queue[ChoiceDelta | EbbtideError | None]") -> None:
        try:
            async with aclosing(self._follow(number)) as following:
                async for delta in following:
                    await queue.put(delta)
        except EbbtideError as error:
            await queue.put(error)
        except Exception as error:  # noqa: BLE001 - raised where the queue is read
            failure = Internal("a completion could not be read")
            failure.__cause__ = error
            await queue.put(failure)
        else:
            await queue.put(None)

    async def _follow(self, number: int) -> AsyncGenerator[ChoiceDelta, None]:
        choice, rollout_id = self._choices[number], self._rollouts[number].rollout_id
        if self._request.prompt_logprobs is not None:
            yield await self._scored(number, self._request.prompt_logprobs)
            return
        async with aclosing(self._lease.tokens(rollout_id)) as chunks:
            async for chunk in chunks:
                ends = chunk.reason in (FinishReason.STOP, FinishReason.LENGTH)
                reason = chunk.reason if ends else None
                delta = await pushed(choice, unpack_tokens(chunk.tokens), reason, self._threads, self._owner)
                if choice.stopped_early and chunk.reason is None:
                    self._stop(rollout_id)
                if len(delta.tokens) or delta.finish is not None:
                    yield delta
                if choice.finished:
                    return
                if chunk.reason is not None:
                    raise _ended_badly(chunk)
        raise Unavailable("the completion's tokens ended without a reason; ask again under the same X-Request-ID")

    async def _scored(self, number: int, alternatives: int) -> ChoiceDelta:
        """The only delta of a completion whose prompt is scored."""
        whole = await whole_response(self._lease, self._rollouts[number].rollout_id)
        if whole.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise _ended_badly(whole)
        scores = unpack_scores(whole.tokens, len(self.prompt_of(number)), alternatives)
        return msgspec.structs.replace(self._choices[number].push(scores.token, whole.reason), scores=scores)

    def _stop(self, rollout_id: str) -> None:
        """End a rollout behind a stop string, while the answer goes on."""
        task = asyncio.create_task(self._end(rollout_id))
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)

    async def _end(self, rollout_id: str) -> None:
        """If this fails, the rollout's tokens cost time and nothing else."""
        with contextlib.suppress(EbbtideError, TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await self._lease.cancel_rollouts([rollout_id])


async def pushed(
    choice: ChoiceText, tokens: TokenArray, reason: FinishReason | None, threads: PromptThreads, owner: str
) -> ChoiceDelta:
    """The delta of a completion's next tokens. Where a whole text may be parsed, by code of others, in a thread."""
    if not choice.may_parse_whole(reason):
        return choice.push(tokens, reason)
    return await threads.run(owner, lambda: choice.push(tokens, reason), refusable=False)


def _ended_badly(chunk: TokenChunk) -> EbbtideError:
    if chunk.reason is FinishReason.DEAD_LETTERED:
        return Unavailable(f"the completion was given up: {chunk.message}")
    return Unavailable(f"the completion was cancelled {f'({chunk.message})' if chunk.message else ''}".strip())
