"""Plays requests for text: checks them, encodes their prompts, names their rollouts, and follows these to their ends.

Invariant: the same request of the same client has the same rollouts at any gateway, as their ids and contents follow
from the request alone. The rollouts are the coordinator's: when the gateway dies, they go on, and a repeat of the
request meets them. So nothing is lost with this process. A submit that has begun is followed to its end, whoever leaves
meanwhile: a cancel that overtook it would end nothing. Each completion's tokens are read by one task at most, and a
completion that is ahead of the answer waits once its queue is full, so that a slow client costs no memory.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

import msgspec

from ebbtide.client.lease import GatewayLease
from ebbtide.errors import (
    AlreadyExists,
    EbbtideError,
    Internal,
    InvalidRequest,
    NoCapacity,
    NotFound,
    RateLimited,
    Unavailable,
)
from ebbtide.gateway.decode import ChoiceDelta, ChoiceText, StopStrings
from ebbtide.gateway.model import ServedModel
from ebbtide.gateway.parsers import OutputParser
from ebbtide.gateway.prompt_threads import PromptThreads
from ebbtide.gateway.request import (
    ChatPrompt,
    IdsPrompt,
    Prompt,
    RawPrompt,
    TextRequest,
    content_digest,
    is_satisfied,
    named_as_asked,
    prompt_field,
    session_episode,
    unsatisfied,
    version_bounds,
)
from ebbtide.types.ids import new_fence, rollout_id_of_request
from ebbtide.types.rollout import FinishReason, RolloutKind, RolloutRequest, TokenChunk
from ebbtide.types.run import Sampling, check_sampling
from ebbtide.types.session import MAX_COMPLETIONS, MeteredKey
from ebbtide.types.tokens import TokenArray, check_records, pack_ids, unpack_scores, unpack_tokens

#: Deltas of one request that wait for its client.
_AHEAD: Final = 16
#: A request waits so long for room at the coordinator.
_ROOM_S: Final = 10.0
#: A rollout is cancelled within so long after its stop string, or goes on to its end.
_STOP_S: Final = 10.0
#: Why a rollout was cancelled whose answer nobody gets.
UNDELIVERED: Final = "undelivered"
#: Prompts of at most so many characters, or tokens for all completions, are worked on at once: a thread takes longer.
_SHORT: Final = 2000
#: A rollout of which the coordinator tells nothing for so long is there, and has no token yet.
_KNOWN_S: Final = 5.0
#: Most tokens of one completion that workers are asked for, as `Sampling.max_tokens` states it.
MAX_NEW_TOKENS: Final = 1 << 20


class RequestPlayer:
    """Prepares requests on one run."""

    def __init__(
        self,
        lease: GatewayLease,
        model: ServedModel,
        *,
        threads: PromptThreads | None = None,
        max_prompt_tokens: int = 0,
    ) -> None:
        """`threads`: those that all runs share. `max_prompt_tokens` 0: what the model's context holds."""
        self.lease, self.model = lease, model
        self.threads = threads or PromptThreads()
        self._max_prompt_tokens = max_prompt_tokens

    async def prepare(self, request: TextRequest, *, owner: str) -> "PlayedRequest":
        """Make a request ready to be submitted.

        Raises `InvalidRequest` naming the field, `VersionUnavailable` for a version that is not there, and `NotReady`
        for a run that has none.
        """
        await self.check(request, owner)
        fields = [prompt_field(request, number) for number in range(len(request.prompts))]
        prompts = [await self.encoded(*one, owner) for one in zip(request.prompts, fields, strict=True)]
        rollouts, choices = await self.completions(request, owner, prompts)
        return PlayedRequest(self.lease, self.threads, request.without_prompts(), rollouts, choices, prompts, owner)

    async def check(self, request: TextRequest, owner: str) -> None:
        """Raise for a request that cannot be played, whatever its prompts are."""
        if not request.prompts:
            raise InvalidRequest("is required and must not be empty", field="prompt")
        if (count := len(request.prompts) * request.n) > MAX_COMPLETIONS:
            raise InvalidRequest(f"asks for {count} completions in all; at most {MAX_COMPLETIONS}", field="n")
        _check_scored(request)
        if request.parse_tools and not self.model.parses_tools:
            raise InvalidRequest(
                "this gateway has no tool parser, so calls could not be told from text; start it with --tool-parser, "
                "or set tool_choice to none",
                field="tools",
            )
        await self._check_versions(request, owner)

    async def completions(
        self, request: TextRequest, owner: str, prompts: Sequence[list[int]]
    ) -> tuple[list[RolloutRequest], list[ChoiceText]]:
        """The rollouts of a request, and what makes text of each. Raises `InvalidRequest` naming the field."""

        def work() -> tuple[list[RolloutRequest], list[ChoiceText]]:
            if request.prompt_logprobs is not None:
                check_records(sum(map(len, prompts)), request.prompt_logprobs, field="prompt_logprobs")
            samplings = [_sampling_of(request, self.model, len(ids)) for ids in prompts]
            rollouts = self._rollouts(request, owner, prompts, samplings)
            choices = [
                self.choice(request, number, rollout.rollout_id, prompts[number // request.n])
                for number, rollout in enumerate(rollouts)
            ]
            return rollouts, choices

        parses = any(isinstance(prompt, ChatPrompt) for prompt in request.prompts)
        if not parses and request.n * sum(map(len, prompts)) <= _SHORT:
            return work()
        return await self.threads.run(owner, work)

    def request_name(self, request: TextRequest, owner: str) -> str:
        """The coordinator's id of a request that has one of its client: the same wherever it is repeated."""
        return _group_of(self.lease.run.run_id, owner, request.session_id, request.request_id)

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raise `InvalidRequest` naming the field for a prompt that no worker could continue."""
        context, vocabulary = self.model.context, self.model.vocabulary
        if not ids:
            raise InvalidRequest("holds no token; there must be something to continue", field=field)
        self.check_length(ids, field)
        if len(ids) >= context:
            text = f"has {len(ids)} tokens, which leaves no room in the model's context of {context}"
            raise InvalidRequest(text, field=field)
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            raise InvalidRequest(f"token ids are 0 to {vocabulary - 1} in this model's vocabulary", field=field)

    def check_length(self, ids: Sequence[int], field: str) -> None:
        """Raise `InvalidRequest` naming the field for more tokens than this gateway takes in a prompt."""
        if (most := self._max_prompt_tokens) and len(ids) > most:
            raise InvalidRequest(f"has {len(ids)} tokens, more than this gateway's {most}", field=field)

    async def encoded(self, prompt: Prompt, field: str, owner: str) -> list[int]:
        """The token ids of a prompt that the model can continue. Raises `InvalidRequest` naming the field."""

        def work() -> list[int]:
            ids = encode_prompt(prompt, self.model)
            self.check_ids(ids, field)
            return ids

        if isinstance(prompt, RawPrompt) and len(prompt.text) <= _SHORT:
            return work()
        return await self.threads.run(owner, work)

    async def _check_versions(self, request: TextRequest, owner: str) -> None:
        """What is known of the run may be some seconds old, so it is asked for before a request is refused.

        A repeat is not refused: its tokens are stored, or its versions were there when it was submitted.
        """
        if is_satisfied(request.versions, self.lease.run):
            return
        run = await self.lease.refreshed()
        if not is_satisfied(request.versions, run) and not await self._is_repeat(request, owner):
            raise unsatisfied(request.versions, run)

    async def _is_repeat(self, request: TextRequest, owner: str) -> bool:
        """Whether the coordinator has the request's rollouts. It tells at once of those that it lacks."""
        if not request.request_id:
            return False
        run_id = self.lease.run.run_id
        first = rollout_id_of_request(run_id, owner, request.session_id, request.request_id, 0)
        try:
            async with asyncio.timeout(_KNOWN_S), aclosing(self.lease.tokens(first)) as chunks:
                await anext(chunks, None)
        except NotFound:
            return False
        except TimeoutError:  # it waits for its first token
            pass
        return True

    def _rollouts(
        self, request: TextRequest, owner: str, prompts: Sequence[list[int]], samplings: Sequence[Sampling]
    ) -> list[RolloutRequest]:
        run_id, asked = self.lease.run.run_id, request.request_id or new_fence()
        names = (run_id, owner, request.session_id, asked)
        group = _group_of(*names)
        episode = session_episode(run_id, owner, request.session_id) if request.session_id else group
        lowest, highest = version_bounds(request.versions)
        digest, packed = content_digest(request), [pack_ids(ids) for ids in prompts]
        return [
            RolloutRequest(
                rollout_id=rollout_id_of_request(*names, number),
                group_id=group,
                episode_id=episode,
                prompt_ids=packed[number // request.n],
                sampling=samplings[number // request.n],
                kind=RolloutKind.REQUEST,
                min_version=lowest,
                max_version=highest,
                priority=request.priority,
                interactive=request.stream,
                client_digest=digest,
                prompt_logprobs=request.prompt_logprobs,
            )
            for number in range(len(prompts) * request.n)
        ]

    def choice(self, request: TextRequest, index: int, rollout_id: str, prompt_ids: list[int]) -> ChoiceText:
        """What makes text of one completion's tokens, as the request wants it."""
        parser = self._parser(request, index, rollout_id, prompt_ids)
        ends = (*(() if request.sampling.ignore_eos else self.model.eos_ids), *request.sampling.stop_token_ids)
        decoder = self.model.detokenizer(
            prompt_ids,
            skip_special=request.skip_special and (parser is None or parser.skip_special),
            hidden_ends=() if request.keep_stop else ends,
        )
        return ChoiceText(
            index,
            decoder,
            stops=StopStrings(request.stop) if request.stop else None,
            parser=parser,
            whole=not request.stream,
            stop_ids=request.sampling.stop_token_ids,
            min_tokens=request.sampling.min_tokens,
            keep_stop=request.keep_stop,
        )

    def _parser(self, request: TextRequest, index: int, rollout_id: str, prompt_ids: list[int]) -> OutputParser | None:
        prompt = request.prompts[index // request.n]
        if self.model.parsers is None or not isinstance(prompt, ChatPrompt):
            return None
        return self.model.parsers.parser(
            tools=prompt.tools,
            tool_choice="auto" if request.parse_tools else "none",
            template_options=prompt.template_options,
            prompt_ids=prompt_ids,
            call_seed=rollout_id,
        )


def _group_of(run_id: str, owner: str, session_id: str, request_id: str) -> str:
    """What the ids of a request's rollouts begin with."""
    return rollout_id_of_request(run_id, owner, session_id, request_id, 0).rpartition("-")[0]


def encode_prompt(prompt: Prompt, model: ServedModel) -> list[int]:
    """The prompt's token ids. Takes milliseconds for a long text. Raises `InvalidRequest` naming the field."""
    match prompt:
        case IdsPrompt(ids):
            return ids
        case RawPrompt(text, special):
            return model.encode(text, special=special)
        case ChatPrompt():
            text = model.render(
                prompt.messages,
                tools=prompt.tools,
                template_options=prompt.template_options,
                generate=prompt.generate,
            )
            return model.encode(text, special=prompt.special)


def _sampling_of(request: TextRequest, model: ServedModel, prompt_tokens: int) -> Sampling:
    """The sampling of one prompt's completions. Raises `InvalidRequest` naming the field.

    Stop strings stay here: the gateway finds them itself. Nobody reads logprobs outside a session that the answer does
    not show, and an engine makes tokens faster without.
    """
    room = model.context - prompt_tokens
    wanted = request.max_tokens
    if request.fits_context and wanted is not None:
        wanted = min(wanted, room, MAX_NEW_TOKENS)
    if wanted is not None and wanted > room:
        raise InvalidRequest(
            f"{wanted} and a prompt of {prompt_tokens} tokens exceed the model's context of "
            f"{model.context}; ask for at most {room}",
            field="max_tokens",
        )
    limit = min(room, MAX_NEW_TOKENS) if wanted is None else wanted
    unread = not (request.logprobs or request.session_id or request.prompt_logprobs is not None)
    sampling = msgspec.structs.replace(request.sampling, max_tokens=limit, without_logprobs=unread)
    try:
        return check_sampling(sampling, field="")
    except InvalidRequest as error:
        raise InvalidRequest(error.text, field=error.field.lstrip(".")) from None


def _check_scored(request: TextRequest) -> None:
    """Raise `InvalidRequest` naming the field for a request that cannot have its prompts scored as it asks."""
    if request.prompt_logprobs is None:
        return
    if request.session_id:
        raise InvalidRequest("a scored prompt is no turn that could be trained on; leave it out", field="X-Session-ID")
    if request.stream:
        raise InvalidRequest("the scores of a prompt come at once; leave it out", field="stream")
    if request.n != 1:
        raise InvalidRequest("a scored prompt has one completion; leave it out", field="n")
    if request.max_tokens != 1:
        text = "a request that has its prompt scored samples at most one token; ask for one"
        raise InvalidRequest(text, field="max_tokens")


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


async def whole_response(lease: GatewayLease, rollout_id: str) -> TokenChunk:
    """All that is stored of a rollout, once it has ended: one version made all scores of a prompt, however many workers
    tried. Raises `Unavailable` if its end cannot be told.
    """
    parts = []
    async with aclosing(lease.tokens(rollout_id)) as chunks:
        async for chunk in chunks:
            parts.append(chunk.tokens)
            if chunk.reason is not None:
                return TokenChunk(offset=0, tokens=b"".join(parts), reason=chunk.reason, message=chunk.message)
    raise Unavailable("the scores ended without a reason; ask again")


def _ended_badly(chunk: TokenChunk) -> EbbtideError:
    if chunk.reason is FinishReason.DEAD_LETTERED:
        return Unavailable(f"the completion was given up: {chunk.message}")
    return Unavailable(f"the completion was cancelled {f'({chunk.message})' if chunk.message else ''}".strip())
