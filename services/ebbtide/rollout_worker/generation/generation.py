"""Decides what is still to be generated of one rollout's response, and where it ends. Pure.

Every ending depends on the response's token ids alone: a response that is cut and continued elsewhere ends where it
would have ended uncut.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from msgspec import Struct

from ebbtide.errors import Internal, InvalidRequest
from ebbtide.rollout_worker.engine import DraftSource, EngineRequest, TokenDelta
from ebbtide.types.fleet import AttemptRef, EngineInfo
from ebbtide.types.rollout import FinishReason
from ebbtide.types.run import Sampling, check_sampling
from ebbtide.types.tokens import (
    ScoreArray,
    check_records,
    pack_scores,
    pack_tokens,
    token_count,
    unpack_ids,
    unpack_tokens,
)

Decode = Callable[[Sequence[int]], str]
#: Tokens decoded before those that a stop string may span, as decoders may treat the beginning of a text differently.
_MARGIN: Final = 8


class HeldForecast(Struct, frozen=True, kw_only=True):
    """What is expected of a rollout that runs here: tokens to come behind the first `stored` of its response."""

    attempt_id: str
    expected_tokens: int = 0  # on average; 0: not known
    stored: int = 0


class Assignment(Struct, frozen=True, kw_only=True):
    """An attempt that the coordinator hands out."""

    attempt: AttemptRef
    policy: str
    prompt_ids: bytes  # packed u32
    sampling: Sampling
    partial: bytes = b""  # packed tokens that are stored
    min_version: int = 0
    max_version: int = 0
    priority: int = 0
    interactive: bool = False  # somebody waits for each token
    episode_id: str = ""  # by which `forget_cached` names its text
    prompt_logprobs: int | None = None  # alternatives of each score; None: the prompt is not scored
    expected_tokens: int = 0  # still to come behind `partial`, on average; 0: not known
    group_id: str = ""  # whose members' tokens it may be drafted from; empty: nothing is drafted
    max_model_len: int = 0  # prompt plus response, at which it ends on any worker; 0: as this engine's context ends

    def admits(self, version: int) -> bool:
        """Whether the rollout takes tokens of `version`; a bound of 0 is none."""
        return self.min_version <= version and not 0 < self.max_version < version


class ResponseEnding:
    """Finds where a response ends. Within its first `min_tokens` tokens, only its length ends it."""

    def __init__(self, sampling: Sampling, info: EngineInfo, *, room: int, decode: Decode) -> None:
        """`room`: tokens that the context leaves for the response."""
        ends = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else info.eos_token_ids))
        # Tokens outside the vocabulary never come, and some engines fail on them.
        self.stop_token_ids = frozenset(token for token in ends if token < info.vocab_size)
        self.limit = min(sampling.max_tokens, room)
        self._min_tokens = sampling.min_tokens
        self._stop = sampling.stop
        # A character is at most four bytes, and a token at least one.
        self._window = 4 * max(map(len, sampling.stop), default=0) + _MARGIN
        self._decode = decode

    def at(self, ids: Sequence[int]) -> FinishReason | None:
        """How the response `ids` ends here; None if it goes on. Without the last token, it has not ended."""
        if len(ids) > self._min_tokens and (ids[-1] in self.stop_token_ids or self._completes_stop(ids)):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(ids) >= self.limit else None

    def _completes_stop(self, ids: Sequence[int]) -> bool:
        if not self._stop:
            return False
        text = self._decode(ids[max(self._min_tokens, len(ids) - self._window) :])
        return any(stop in text for stop in self._stop)


class Generation:
    """The response of one attempt, from its partial on. `finish` is set when it has ended, possibly at once."""

    def __init__(self, assignment: Assignment, info: EngineInfo, decode: Decode, *, stream_interval: int = 1) -> None:
        """`stream_interval`: tokens that the engine delivers together, unless somebody waits for each, or a stop string
        may end the response at any. Raises `InvalidRequest` naming the field if this engine cannot take the assignment
        as it is."""
        check_sampling(assignment.sampling, field="sampling")
        prompt = unpack_ids(assignment.prompt_ids).tolist()
        self._ids: list[int] = unpack_tokens(assignment.partial, field="partial")["id"].tolist()
        check_context(prompt + self._ids, len(prompt), info)
        self._assignment, self._prompt = assignment, prompt
        self._stream_interval = 1 if assignment.interactive or assignment.sampling.stop else stream_interval
        context = assignment.max_model_len or info.max_model_len
        self._ending = ResponseEnding(assignment.sampling, info, room=context - len(prompt), decode=decode)
        # What is longer than the run's context was given before the coordinator noted a longer one.
        self.finish = self._ending.at(self._ids) if 0 < len(self._ids) <= self._ending.limit else None
        self._room = min(self._ending.limit, info.max_model_len - len(prompt))

    @property
    def outgrown(self) -> bool:
        """Whether the response fills this engine's context, or the run's as its coordinator knew it, and has not ended:
        only a longer context takes more.
        """
        return self.finish is None and len(self._ids) >= self._room

    def request(self) -> EngineRequest:
        """A request for the rest of the response, as far as this engine's context goes. Not for one that is outgrown:
        there is no room for more.
        """
        sampling, made = self._assignment.sampling, len(self._ids)
        most = self._room - made
        return EngineRequest(
            request_id=self._assignment.attempt.attempt_id,
            cache_name=self._assignment.episode_id,
            token_ids=self._prompt + self._ids,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=most,
            min_tokens=max(0, min(sampling.min_tokens - made, most)),
            stop_token_ids=sorted(self._ending.stop_token_ids),
            repetition_penalty=sampling.repetition_penalty,
            logprobs=not sampling.without_logprobs,
            priority=self._assignment.priority,
            drafts=self._drafts(made),
            stream_interval=self._stream_interval,
        )

    def _drafts(self, made: int) -> DraftSource | None:
        """Nothing is drafted under a repetition penalty: engines count drafted tokens in ways of their own."""
        assignment = self._assignment
        if not assignment.group_id or assignment.sampling.repetition_penalty != 1.0:
            return None
        return DraftSource(group=assignment.group_id, rollout_id=assignment.attempt.rollout_id, made=made)

    def accept(self, delta: TokenDelta) -> bytes:
        """Add the engine's tokens, up to the response's end. Returns the added tokens, packed."""
        kept = 0
        for token in delta.ids:
            self._ids.append(token)
            kept += 1
            if (finish := self._ending.at(self._ids)) is not None:
                self.finish = finish
                break
        else:
            cut = delta.finish is FinishReason.LENGTH and self.outgrown  # by this engine's context alone
            self.finish = None if cut else delta.finish
        if kept == len(delta.ids):
            return pack_tokens(delta.ids, delta.logprobs, delta.versions)
        return pack_tokens(delta.ids[:kept], delta.logprobs[:kept], delta.versions[:kept])

    def generated(self, accepted: bytes) -> int:
        """How many tokens were generated for what `accept` returned."""
        return token_count(accepted)


class PromptScoring:
    """The scores of one attempt's prompt, with one token sampled behind it, in the place of a `Generation`.

    Scores are of one version and of one worker, or there are none: an attempt that is lost leaves nothing behind, and
    the next one asks for all of them again. `finish` is set once they are there.
    """

    outgrown: Final = False  # it begins only where the prompt and its one token fit

    def __init__(self, assignment: Assignment, info: EngineInfo, decode: Decode) -> None:
        """Raises `InvalidRequest` naming the field if this engine cannot take the assignment as it is."""
        sampling = check_sampling(assignment.sampling, field="sampling")
        self._prompt: list[int] = unpack_ids(assignment.prompt_ids).tolist()
        check_context(self._prompt, len(self._prompt), info)
        self._alternatives = assignment.prompt_logprobs or 0
        check_records(len(self._prompt), self._alternatives, field="prompt_logprobs")
        if sampling.max_tokens != 1:
            raise InvalidRequest("must be 1 where a prompt is scored", field="sampling.max_tokens")
        if assignment.partial:
            raise InvalidRequest("must be empty: a prompt is scored whole", field="partial")
        self._assignment = assignment
        self._ending = ResponseEnding(sampling, info, room=1, decode=decode)
        self.finish: FinishReason | None = None

    def request(self) -> EngineRequest:
        """A request for all scores."""
        sampling = self._assignment.sampling
        return EngineRequest(
            request_id=self._assignment.attempt.attempt_id,
            token_ids=self._prompt,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=1,
            min_tokens=sampling.min_tokens,
            stop_token_ids=sorted(self._ending.stop_token_ids),
            repetition_penalty=sampling.repetition_penalty,
            priority=self._assignment.priority,
            prompt_logprobs=self._alternatives,
        )

    def accept(self, delta: TokenDelta) -> bytes:
        """The engine's scores, packed. Raises `Internal` if they are not those of the prompt."""
        places = self._checked(delta)
        self.finish = self._ending.at(delta.ids)
        return pack_scores(places, pack_tokens(delta.ids, delta.logprobs, delta.versions))

    def generated(self, accepted: bytes) -> int:  # noqa: ARG002 - scores are no tokens, however many there are
        """How many tokens were generated for what `accept` returned."""
        return 1

    def _checked(self, delta: TokenDelta) -> ScoreArray:
        places = delta.scores
        if len(delta.ids) != 1 or places is None or places.shape != (len(self._prompt), 1 + self._alternatives):
            raise Internal("the engine did not score the prompt as it was asked to")
        if not np.array_equal(places["id"][:, 0], [*self._prompt[1:], *delta.ids]):
            raise Internal("the engine scored another text than the prompt")
        return places


def check_context(ids: Sequence[int], prompt_tokens: int, info: EngineInfo) -> None:
    """Refuse a prompt, with what follows it in `ids`, that the engine cannot continue."""
    if not prompt_tokens:
        raise InvalidRequest("an empty prompt cannot be continued", field="prompt_ids")
    if prompt_tokens >= info.max_model_len:
        raise InvalidRequest(
            f"{prompt_tokens} tokens leave no room in this engine's context of {info.max_model_len}", field="prompt_ids"
        )
    if max(ids) >= info.vocab_size:
        raise InvalidRequest(
            f"token {max(ids)} is not in this engine's vocabulary of {info.vocab_size}", field="prompt_ids"
        )
