"""Has one rollout's prompt scored, with one token sampled behind it. Pure.

Scores are of one version and of one worker, or there are none: an attempt that is lost leaves nothing behind, and the
next one asks for all of them again.
"""

from typing import Final

import numpy as np

from ebbtide.errors import Internal, InvalidRequest
from ebbtide.rollout_worker.engine import EngineRequest, TokenDelta
from ebbtide.rollout_worker.generation.generation import Assignment, Decode, ResponseEnding, check_context
from ebbtide.types.fleet import EngineInfo
from ebbtide.types.prompt_scores import ScoreArray, check_records, pack_scores
from ebbtide.types.rollout import FinishReason
from ebbtide.types.run import check_sampling
from ebbtide.types.tokens import pack_tokens, unpack_ids


class PromptScoring:
    """The scores of one attempt, in the place of a `Generation`. `finish` is set once they are there."""

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
