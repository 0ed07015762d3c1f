"""Follows one session at this gateway: its turns as the coordinator has them, and their completions.

Invariant: `lock` is held while the book is read or changed, and turns are booked in the order of their numbers. A
completion is booked once it gets no more tokens. Completions of answers under way here come from these answers, all
others are read from the coordinator. What is lost with the process: nothing; another gateway reads all of it again.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ebbtide.client.lease import GatewayLease
from ebbtide.errors import EbbtideError, NotFound, Unavailable
from ebbtide.gateway.decode import ChoiceResult, ChoiceText
from ebbtide.gateway.request import ChatPrompt, IdsPrompt, RawPrompt, TextRequest
from ebbtide.gateway.request_player import UNDELIVERED, RequestPlayer, pushed
from ebbtide.gateway.sessions.book import PlannedTurn, SessionBook
from ebbtide.gateway.sessions.turns import TurnSettings, turn_settings, unpack_settings
from ebbtide.types.rollout import FinishReason
from ebbtide.types.session import MeteredKey, Session, SessionState, SessionTurn
from ebbtide.types.tokens import TOKEN_BYTES, TokenArray, unpack_tokens


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


T = TypeVar("T")
#: Completions that are read at once for a session that is new here.
_AT_ONCE: Final = 32
#: A reader gives its place to another after so long.
_HELD_S: Final = 1.0
#: Bytes of a turn beside its ids: record, digests and objects. Of a token: its record, and its id in the tree.
_TURN_BYTES: Final = 4096
_BYTES_PER_TOKEN: Final = TOKEN_BYTES + 4


class LongReaders:
    """Room for readers, of all sessions together, that gave their places to others and go on."""

    def __init__(self, room: int = 1024) -> None:
        self.room = room


class LiveSession:
    """One session. `session` is as it was read last; None: not read yet."""

    def __init__(
        self, session_id: str, owner: str, lease: GatewayLease, player: RequestPlayer, long_readers: LongReaders
    ) -> None:
        self.session_id, self.owner = session_id, owner
        self.lease, self.player = lease, player
        self.lock = asyncio.Lock()
        self.session: Session | None = None
        self.book = SessionBook(player.model)
        self.truncated: set[str] = set()  # rollouts that ended by their length
        self.bytes = 0  # about what the book takes
        self.users = 0
        self._settings: dict[int, TurnSettings] = {}
        self._turn_of: dict[str, int] = {}
        self._complete: set[str] = set()
        self._fresh: list[ReadCompletion] = []
        self._answering: Counter[str] = Counter()
        self._readers: dict[str, asyncio.Task[ReadCompletion]] = {}
        self._slow: set[str] = set()  # rollouts that were waited for already
        self._at_once, self._long_readers = asyncio.Semaphore(_AT_ONCE), long_readers

    # -- what answers under way here tell ------------------------------------------------------------------------

    @contextmanager
    def answering(self, rollout_ids: Sequence[str]) -> Iterator[None]:
        """Inside the block an answer of this gateway brings these rollouts' tokens."""
        self._answering.update(rollout_ids)
        try:
            yield
        finally:
            self._answering.subtract(rollout_ids)

    def take(self, completion: ReadCompletion) -> None:
        """Note a completion that an answer has brought to its end. It is booked by the next turn."""
        self._fresh.append(completion)

    # -- under the lock ------------------------------------------------------------------------------------------

    async def catch_up(self, patience_s: float) -> Session:
        """Book the turns that others added, and completions that have finished. Raises `NotFound`.

        Completions that still run, and that nobody reads here, are waited for once, for so long: a client that sends
        an answer back has it.
        """
        for completion in self._fresh:
            self._book(completion)
        self._fresh.clear()
        session = await self._read_turns()
        if session.state is SessionState.OPEN:
            await self._read_rest(patience_s)
        return session

    async def plan(self, request: TextRequest) -> PlannedTurn:
        """Plan the turn of a request with one prompt. Raises `InvalidRequest` naming the field."""
        settings, prompt = self._shared_tools(turn_settings(request)).packed(), request.prompts[0]

        def work() -> PlannedTurn:
            match prompt:
                case IdsPrompt(ids):
                    return self.book.plan_ids(ids, settings=settings)
                case RawPrompt(text, special):
                    return self.book.plan_text(text, special=special, settings=settings)
                case ChatPrompt():
                    return self.book.plan_chat(
                        prompt.messages,
                        tools=prompt.tools,
                        template_options=prompt.template_options,
                        settings=settings,
                    )

        return await _to_its_end(self.player.threads.run(self.owner, work))

    async def add(self, turn: SessionTurn, key: MeteredKey | None = None, tokens: int = 0) -> None:
        """Add a turn at the coordinator, and book it as it is stored there. `key`: the client's, if it has limits;
        `tokens`: that the turn may come to.
        """
        stored = await self.lease.add_turn(self.session_id, self.owner, turn, key=key, tokens=tokens)
        if stored.number == self.book.last + 1:
            await self._add(stored)
        else:  # another gateway added some at the same time
            await self._read_turns()

    def settings_of(self, number: int) -> TurnSettings:
        return self._settings[number]

    def missing(self) -> list[str]:
        """The rollouts that are not known to the end."""
        return [one for one in self._turn_of if one not in self._complete]

    async def read(self, rollout_ids: Sequence[str]) -> None:
        """Follow rollouts to their ends, and book them. Those that were not submitted stay missing."""
        for completion in await asyncio.gather(*map(self._reader, rollout_ids)):
            self._book(completion)

    def close(self) -> None:
        for task in self._readers.values():
            task.cancel()

    async def _read_turns(self) -> Session:
        while True:
            page = await self.lease.read_turns(self.session_id, self.owner, self.book.last)
            self.session = page.session
            if page.session.state is not SessionState.OPEN:  # its rollouts are deleted
                return page.session
            for turn in page.turns:
                await self._add(turn)
            if not page.more:
                return page.session

    async def _add(self, turn: SessionTurn) -> None:
        if (rollout_id := self.book.needed(turn.record)) is not None:
            await self.read([rollout_id])
            if self.book.needed(turn.record) is not None:
                raise Unavailable(f"tokens of rollout {rollout_id} are not there yet; try again")
        booked = self.book.add(turn.number, turn.request_id, turn.rollout_ids, turn.record)
        self._settings[turn.number] = unpack_settings(booked.record.settings)
        self._turn_of |= dict.fromkeys(turn.rollout_ids, turn.number)
        self.bytes += len(turn.record) + _TURN_BYTES

    def _book(self, completion: ReadCompletion) -> None:
        rollout_id = completion.rollout_id
        self._readers.pop(rollout_id, None)
        if rollout_id in self._complete or completion.absent:
            return
        self._complete.add(rollout_id)
        self.bytes += len(completion.tokens) * _BYTES_PER_TOKEN
        self.book.set_tokens(rollout_id, completion.tokens, delivered=not completion.undelivered)
        if completion.truncated:
            self.truncated.add(rollout_id)
        if self._settings[self._turn_of[rollout_id]].prompt == "chat":
            for answer in completion.answers:
                self.book.set_answer(rollout_id, answer)

    async def _read_rest(self, patience_s: float) -> None:
        missing = [one for one in self.missing() if not self._answering[one]]
        readers = {one: self._reader(one) for one in missing}
        if new := [task for one, task in readers.items() if one not in self._slow]:
            await asyncio.wait(new, timeout=patience_s)
        self._slow.update(missing)
        for rollout_id, task in readers.items():
            if task.done():
                self._book(_result(self._readers, rollout_id))

    def _reader(self, rollout_id: str) -> "asyncio.Task[ReadCompletion]":
        task = self._readers.get(rollout_id)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._readers[rollout_id] = asyncio.create_task(self._read(rollout_id))
        return task

    async def _read(self, rollout_id: str) -> ReadCompletion:
        number = self._turn_of[rollout_id]
        settings = self._settings[number]
        tools = self._settings[settings.tools_of].tools if settings.tools_of else settings.tools
        async with self._place():
            prompt = self.book.prompt_ids(number)
            return await read_completion(self.player, settings.asked(tools), rollout_id, prompt, self.owner)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """One of the places of readers. One that still reads after a while has come to what is being made, and holds up
        no other any more, as far as there is room for long readers.
        """
        await self._at_once.acquire()
        loop, is_long = asyncio.get_running_loop(), False

        timer: asyncio.TimerHandle

        def give_back() -> None:
            nonlocal timer, is_long
            if self._long_readers.room > 0:
                self._long_readers.room -= 1
                is_long = True
                self._at_once.release()
            else:
                timer = loop.call_later(_HELD_S, give_back)

        timer = loop.call_later(_HELD_S, give_back)
        try:
            yield
        finally:
            timer.cancel()
            if is_long:
                self._long_readers.room += 1
            else:
                self._at_once.release()

    def _shared_tools(self, settings: TurnSettings) -> TurnSettings:
        """Tools are long, and most turns of an agent have the same: they are stored once."""
        if settings.tools is None:
            return settings
        same = (number for number, one in self._settings.items() if one.tools == settings.tools)
        number = next(same, 0)
        return replace(settings, tools=None, tools_of=number) if number else settings


def _result(readers: "dict[str, asyncio.Task[ReadCompletion]]", rollout_id: str) -> ReadCompletion:
    """What a reader found. One that failed is forgotten, so that the next turn tries again."""
    task = readers.pop(rollout_id)
    if task.cancelled():
        raise Unavailable("the session is being reloaded; try again")
    error = task.exception()
    if isinstance(error, EbbtideError):
        raise error
    return task.result()


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread, and return or be cancelled only once it has ended: it alone uses the book meanwhile."""
    return await _to_its_end(asyncio.to_thread(work))


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.create_task(work)
    try:
        result = await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
    return result
