"""Plays a request for text: encodes its prompts, submits their rollouts, and follows these.

Invariant: the same request of the same client has the same rollouts at any gateway, as their ids and contents follow
from the request alone. So nothing is lost with this process.
"""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.generation.choice_text import ChoiceText
from ebbtide.gateway.generation.played_request import PlayedRequest
from ebbtide.gateway.generation.prompt_encoding import check_length, check_prompt, encode_prompt, sampling_of
from ebbtide.gateway.generation.rollout_source import RolloutSource
from ebbtide.gateway.generation.session_episode import session_episode
from ebbtide.gateway.generation.text_model import TextModel
from ebbtide.gateway.generation.text_request import ChatPrompt, Prompt, RawPrompt, TextRequest
from ebbtide.gateway.generation.version_wishes import is_satisfied, unsatisfied, version_bounds
from ebbtide.gateway.text.output_parsers import OutputParser
from ebbtide.gateway.text.stop_strings import StopStrings
from ebbtide.types.ids import new_fence, rollout_id_of_request
from ebbtide.types.rollout import RolloutKind, RolloutRequest
from ebbtide.types.run import Sampling
from ebbtide.types.session import MAX_COMPLETIONS
from ebbtide.types.tokens import pack_ids

#: Prompts of at most so many characters are encoded at once: a thread would take longer.
_SHORT: Final = 2000
#: A field of a rollout, as the coordinator names it.
_ROLLOUT_FIELD: Final = re.compile(r"rollouts\[(?P<number>\d+)\]\.(?:sampling\.)?(?P<name>\w+)")


class RequestPlayer:
    """Plays requests on one run."""

    def __init__(self, source: RolloutSource, model: TextModel, *, max_prompt_tokens: int = 0) -> None:
        """`max_prompt_tokens` 0: what the model's context holds."""
        self.source, self.model = source, model
        self._max_prompt_tokens = max_prompt_tokens

    async def play(self, request: TextRequest, *, owner: str) -> PlayedRequest:
        """Submit a request's rollouts.

        Raises `InvalidRequest` naming the field, `VersionUnavailable` for a version that is not there, `NotReady` for
        a run that has none, `AlreadyExists` for the id of another request.
        """
        await self.check(request)
        prompts = [await self.encoded(prompt, _field(request, number)) for number, prompt in enumerate(request.prompts)]
        rollouts, choices = self.prepared(request, owner, prompts)
        await self.submit(request, rollouts)
        return PlayedRequest(self.source, rollouts, choices, prompts)

    async def check(self, request: TextRequest) -> None:
        """Raise for a request that cannot be played, whatever its prompts are."""
        _check_count(request)
        self._check_tools(request)
        await self._check_versions(request)

    def prepared(
        self, request: TextRequest, owner: str, prompts: Sequence[list[int]]
    ) -> tuple[list[RolloutRequest], list[ChoiceText]]:
        """The rollouts of a request, and what makes text of each. Raises `InvalidRequest` naming the field."""
        samplings = [sampling_of(request, self.model, len(ids)) for ids in prompts]
        rollouts = self._rollouts(request, owner, prompts, samplings)
        choices = [
            self.choice(request, number, rollout.rollout_id, prompts[number // request.n])
            for number, rollout in enumerate(rollouts)
        ]
        return rollouts, choices

    async def submit(self, request: TextRequest, rollouts: Sequence[RolloutRequest]) -> None:
        """Queue a request's rollouts. Known ones change nothing."""
        with _named_as_asked(request):
            await self.source.submit(rollouts)

    def request_name(self, request: TextRequest, owner: str) -> str:
        """The coordinator's id of a request that has one of its client: the same wherever it is repeated."""
        return _group_of(self.source.run.run_id, owner, request.session_id, request.request_id)

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raise `InvalidRequest` naming the field for a prompt that the model cannot continue."""
        check_prompt(ids, self.model, max_prompt_tokens=self._max_prompt_tokens, field=field)

    def check_length(self, ids: Sequence[int], field: str) -> None:
        """Raise `InvalidRequest` naming the field for more tokens than this gateway takes in a prompt."""
        check_length(ids, max_prompt_tokens=self._max_prompt_tokens, field=field)

    async def encoded(self, prompt: Prompt, field: str) -> list[int]:
        """The token ids of a prompt that the model can continue. Raises `InvalidRequest` naming the field."""

        def work() -> list[int]:
            ids = encode_prompt(prompt, self.model)
            self.check_ids(ids, field)
            return ids

        return await _aside(prompt, work)

    async def _check_versions(self, request: TextRequest) -> None:
        """What is known of the run may be some seconds old, so it is asked for before a request is refused."""
        if is_satisfied(request.versions, self.source.run):
            return
        run = await self.source.refreshed()
        if not is_satisfied(request.versions, run):
            raise unsatisfied(request.versions, run)

    def _rollouts(
        self, request: TextRequest, owner: str, prompts: Sequence[list[int]], samplings: Sequence[Sampling]
    ) -> list[RolloutRequest]:
        run_id, asked = self.source.run.run_id, request.request_id or new_fence()
        names = (run_id, owner, request.session_id, asked)
        group = _group_of(*names)
        episode = session_episode(run_id, owner, request.session_id) if request.session_id else group
        lowest, highest = version_bounds(request.versions)
        return [
            RolloutRequest(
                rollout_id=rollout_id_of_request(*names, number),
                group_id=group,
                episode_id=episode,
                prompt_ids=pack_ids(prompts[number // request.n]),
                sampling=samplings[number // request.n],
                kind=RolloutKind.REQUEST,
                min_version=lowest,
                max_version=highest,
                priority=request.priority,
                interactive=request.stream,
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
        if not isinstance(prompt, ChatPrompt):
            return None
        return self.model.parser(
            tools=prompt.tools,
            tool_choice="auto" if request.parse_tools else "none",
            template_options=prompt.template_options,
            prompt_ids=prompt_ids,
            call_seed=rollout_id,
        )

    def _check_tools(self, request: TextRequest) -> None:
        if request.parse_tools and not self.model.parses_tools:
            raise InvalidRequest(
                "this gateway has no tool parser, so calls could not be told from text; start it with --tool-parser, "
                "or set tool_choice to none",
                field="tools",
            )


def _group_of(run_id: str, owner: str, session_id: str, request_id: str) -> str:
    """What the ids of a request's rollouts begin with."""
    return rollout_id_of_request(run_id, owner, session_id, request_id, 0).rpartition("-")[0]


@contextmanager
def _named_as_asked(request: TextRequest) -> Iterator[None]:
    """Have what the coordinator refuses of a rollout name the client's field instead."""
    try:
        yield
    except InvalidRequest as error:
        text = str(error).removeprefix(f"{error.field}: ")
        match = _ROLLOUT_FIELD.fullmatch(error.field)
        if match is None:
            raise
        prompt = _field(request, int(match["number"]) // request.n)
        raise InvalidRequest(text, field=prompt if match["name"] == "prompt_ids" else match["name"]) from None


def _check_count(request: TextRequest) -> None:
    if not request.prompts:
        raise InvalidRequest("is required and must not be empty", field="prompt")
    if (count := len(request.prompts) * request.n) > MAX_COMPLETIONS:
        raise InvalidRequest(f"asks for {count} completions in all; at most {MAX_COMPLETIONS}", field="n")


def _field(request: TextRequest, number: int) -> str:
    if isinstance(request.prompts[number], ChatPrompt):
        return "messages"
    return "prompt" if len(request.prompts) == 1 else f"prompt[{number}]"


async def _aside(prompt: Prompt, work: Callable[[], list[int]]) -> list[int]:
    """Run `work` in a thread unless it is short: the event loop serves other clients meanwhile."""
    if isinstance(prompt, RawPrompt) and len(prompt.text) <= _SHORT:
        return work()
    return await asyncio.to_thread(work)
