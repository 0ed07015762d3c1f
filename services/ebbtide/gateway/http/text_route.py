"""Serves one route that generates text: reads the body, plays the request, and sends its answer whole or in events.

A client that leaves ends its rollouts only if it gave no id under which it could come back.
"""

import asyncio
import contextlib
import time
from contextlib import aclosing
from functools import partial
from typing import Final

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from ebbtide.errors import EbbtideError, Unavailable
from ebbtide.gateway.access import ClientKey, RequestSlot
from ebbtide.gateway.decode import ChoiceResult
from ebbtide.gateway.dialects.dialect import Answer, AnswerContext, AskedText, Dialect, ErrorShape
from ebbtide.gateway.http.route import REQUEST_ID, AppState, HttpReply, as_told, read_body, with_ids
from ebbtide.gateway.metrics import FIRST_TOKEN_SECONDS, GAP_SECONDS, LEFT, REQUESTS, STREAMS, TOKENS, UNDER_WAY
from ebbtide.gateway.request import TextRequest
from ebbtide.gateway.request_player import PlayedRequest
from ebbtide.gateway.runs import ServedRun
from ebbtide.types.ids import new_fence
from ebbtide.types.session import MAX_COMPLETIONS

#: A client's rollouts are cancelled within so long after it left, or not at all: they cost tokens, and nothing else.
CANCEL_S: Final = 10.0


class TextRoute:
    """An ASGI application."""

    def __init__(self, state: AppState, dialect: Dialect, shape: ErrorShape, name: str) -> None:
        """`name`: of the route, for metrics."""
        self._state, self._dialect, self._shape, self._name = state, dialect, shape, name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        reply = HttpReply(receive, send, new_fence())
        outcome = "ok"
        try:
            key = self._state.keys.admit(headers)
            self._state.check_open()
            with self._state.slots.taken(key) as slot, UNDER_WAY.track_inprogress():
                body = await read_body(headers, receive, self._state.limits, slot)
                asked = self._dialect.read(body)
                slot.add_completions(min(len(asked.request.prompts) * asked.request.n, MAX_COMPLETIONS))
                path, named_by = scope.get("path_params", {}), self._state.request_id_header
                request = key.admitted(with_ids(asked.request, headers, path, named_by))
                asked = AskedText(request, asked.answer)
                reply.request_id = asked.request.request_id or reply.request_id
                exchange = _TextExchange(self._state, reply, asked, slot)
                del body, asked, request  # the exchange lets go of them before the answer has ended
                outcome = await exchange.run(key)
        except Exception as error:  # noqa: BLE001 - the client is told, and unexpected errors are logged
            told, outcome = as_told(error, reply.request_id)
            if not reply.started:
                reply.request_id = _echoed(headers) or reply.request_id
                await reply.error(told, self._shape)
        finally:
            REQUESTS.labels(self._name, outcome).inc()


class _TextExchange:
    """One request that was read."""

    def __init__(self, state: AppState, reply: HttpReply, asked: AskedText, slot: RequestSlot) -> None:
        self._state, self._reply, self._slot = state, reply, slot
        self._asked: AskedText | None = asked
        self._request: TextRequest = asked.request
        self._answer: Answer | None = None
        self._played: PlayedRequest | None = None
        self._complete = False
        self._began = time.monotonic()

    async def run(self, key: ClientKey) -> str:
        """The outcome, for metrics. Raises an error if nothing was sent yet; later ones are sent as events."""
        limits = self._state.limits
        work = asyncio.create_task(self._bounded(key, limits.request_s))
        gone = asyncio.create_task(self._reply.departure(lambda: self._answer, limits.keep_alive_s))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            if not self._complete:
                await self._end_rollouts()
        if work.cancelled():
            LEFT.inc()
            return "left"
        work.result()
        return "ok" if self._complete else "failed"

    async def _end_rollouts(self) -> None:
        """Cancel what nobody can come back for."""
        if self._request.returns or self._played is None:
            return
        with contextlib.suppress(EbbtideError, TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                await self._played.cancel()

    async def _bounded(self, key: ClientKey, request_s: float) -> None:
        try:
            async with asyncio.timeout(request_s):
                await self._serve(key)
        except TimeoutError:
            error = Unavailable(f"the request took more than {request_s:g} s, the most that this gateway gives one")
            await self._fail(error)

    async def _serve(self, key: ClientKey) -> None:
        served = await self._state.directory.find(key, self._request.model)
        with served.in_use():
            played = self._played = await self._prepared(served, key)
            answer = self._answering(played, served)
            try:
                await played.submit(key.metered)
                if self._request.prompt_logprobs is None:
                    await self._send(played, answer)
                else:
                    # So many scores take a while to shape. They were made and charged: nothing refuses them here.
                    results, threads = await self._results(played), served.player.threads
                    await self._reply.json(
                        await threads.run(key.owner, lambda: _shaped(answer, results), refusable=False)
                    )
            except EbbtideError as error:
                await self._fail(error)

    async def _prepared(self, served: ServedRun, key: ClientKey) -> PlayedRequest:
        if self._request.session_id:
            return await self._state.sessions_of(served.lease, served.player, key).prepare(self._request, key.metered)
        return await served.player.prepare(self._request, owner=key.owner)

    def _answering(self, played: PlayedRequest, served: ServedRun) -> Answer:
        """What shapes the answer. The body is let go of: a long answer must not keep a long prompt."""
        assert self._asked is not None  # noqa: S101 - once
        context = AnswerContext(
            request_id=self._reply.request_id,
            created=int(time.time()),
            played=played,
            token_text=served.player.model.token_text,
            decode=partial(served.player.model.decode, skip_special=False),
        )
        answer = self._answer = self._asked.answer(context)
        self._asked, self._request = None, self._request.without_prompts()
        self._slot.release_body()
        return answer

    async def _send(self, played: PlayedRequest, answer: Answer) -> None:
        if self._request.stream:
            with STREAMS.track_inprogress():
                await self._send_events(played, answer)
        else:
            await self._reply.json(answer.whole(await self._results(played)))

    async def _send_events(self, played: PlayedRequest, answer: Answer) -> None:
        await self._reply.begin_events()
        await self._reply.events(answer.begin())
        last = 0.0
        async with aclosing(played.deltas()) as deltas:
            async for delta in deltas:
                last = self._timed(last)
                TOKENS.inc(len(delta.tokens))
                await self._reply.events(answer.events(delta))
        self._complete = True
        await self._reply.end_events(answer.end())

    def _timed(self, last: float) -> float:
        """Measure the wait for a part of the stream. `last`: when the one before came; 0: this is the first."""
        now = time.monotonic()
        if last:
            GAP_SECONDS.observe(now - last)
        else:
            FIRST_TOKEN_SECONDS.observe(now - self._began)
        return now

    async def _results(self, played: PlayedRequest) -> list[ChoiceResult]:
        results = [ChoiceResult(number) for number in range(played.completions)]
        async with aclosing(played.deltas()) as deltas:
            async for delta in deltas:
                TOKENS.inc(len(delta.tokens))
                results[delta.index].add(delta)
        self._complete = True
        return results

    async def _fail(self, error: EbbtideError) -> None:
        """Tell of an error behind the answer's beginning; else raise it."""
        if not self._reply.started or self._answer is None:
            raise error
        told, _ = as_told(error, self._reply.request_id)
        await self._reply.end_events(self._answer.failure(told))


def _shaped(answer: Answer, results: list[ChoiceResult]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(answer.whole(results)))


def _echoed(headers: Headers) -> str:
    """The client's id of its request, if an answer can carry it."""
    given = headers.get(REQUEST_ID, "")
    return given if given.isascii() and given.isprintable() and len(given) <= 256 else ""
