"""Prepares requests for text: checks them, encodes their prompts, and names their rollouts.

Invariant: the same request of the same client has the same rollouts at any gateway, as their ids and contents follow
from the request alone. So nothing is lost with this process.
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Final

from ebbtide.client.gateway_lease import GatewayLease
from ebbtide.errors import InvalidRequest, NotFound
from ebbtide.gateway.generation.choice_text import ChoiceText
from ebbtide.gateway.generation.played_request import PlayedRequest
from ebbtide.gateway.generation.prompt_encoding import check_length, check_prompt, encode_prompt, sampling_of
from ebbtide.gateway.generation.prompt_threads import PromptThreads
from ebbtide.gateway.generation.request_digest import content_digest
from ebbtide.gateway.generation.request_fields import prompt_field
from ebbtide.gateway.generation.scored_requests import check_score_count, check_scored
from ebbtide.gateway.generation.session_episode import session_episode
from ebbtide.gateway.generation.text_request import ChatPrompt, Prompt, RawPrompt, TextRequest
from ebbtide.gateway.generation.version_wishes import is_satisfied, unsatisfied, version_bounds
from ebbtide.gateway.text.output_parsers import OutputParser
from ebbtide.gateway.text.served_model import ServedModel
from ebbtide.gateway.text.stop_strings import StopStrings
from ebbtide.types.ids import new_fence, rollout_id_of_request
from ebbtide.types.rollout import RolloutKind, RolloutRequest
from ebbtide.types.run import Sampling
from ebbtide.types.session import MAX_COMPLETIONS
from ebbtide.types.tokens import pack_ids

#: Prompts of at most so many characters, or tokens for all completions, are worked on at once: a thread takes longer.
_SHORT: Final = 2000
#: A rollout of which the coordinator tells nothing for so long is there, and has no token yet.
_KNOWN_S: Final = 5.0


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

    async def prepare(self, request: TextRequest, *, owner: str) -> PlayedRequest:
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
        _check_count(request)
        check_scored(request)
        self._check_tools(request)
        await self._check_versions(request, owner)

    async def completions(
        self, request: TextRequest, owner: str, prompts: Sequence[list[int]]
    ) -> tuple[list[RolloutRequest], list[ChoiceText]]:
        """The rollouts of a request, and what makes text of each. Raises `InvalidRequest` naming the field."""

        def work() -> tuple[list[RolloutRequest], list[ChoiceText]]:
            check_score_count(request, prompts)
            samplings = [sampling_of(request, self.model, len(ids)) for ids in prompts]
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
        """Raise `InvalidRequest` naming the field for a prompt that the model cannot continue."""
        check_prompt(ids, self.model, max_prompt_tokens=self._max_prompt_tokens, field=field)

    def check_length(self, ids: Sequence[int], field: str) -> None:
        """Raise `InvalidRequest` naming the field for more tokens than this gateway takes in a prompt."""
        check_length(ids, max_prompt_tokens=self._max_prompt_tokens, field=field)

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
        if not isinstance(prompt, ChatPrompt):
            return None
        return self.model.parsers.parser(
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


def _check_count(request: TextRequest) -> None:
    if not request.prompts:
        raise InvalidRequest("is required and must not be empty", field="prompt")
    if (count := len(request.prompts) * request.n) > MAX_COMPLETIONS:
        raise InvalidRequest(f"asks for {count} completions in all; at most {MAX_COMPLETIONS}", field="n")
