"""A worker scores a prompt whole: of one attempt, in one message, or not at all."""

from typing import Any

import msgspec
import numpy as np
import pytest

from ebbtide.errors import Internal, InvalidRequest
from ebbtide.rollout_worker.engine import TokenDelta
from ebbtide.rollout_worker.generation.generation import Assignment, PromptScoring
from ebbtide.rollout_worker.generation.outbox import MESSAGE_TOKENS, Outbox
from ebbtide.types.fleet import AttemptRef, EngineInfo
from ebbtide.types.rollout import FinishReason
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import MAX_RECORDS, TOKEN_BYTES, pack_ids, pack_tokens, unpack_scores
from tests.fakes.scripted_engine import script_scores
from tests.fakes.scripted_settings import ScriptedSettings

EOS = 1
INFO = EngineInfo(model="m", vocab_size=128, max_model_len=64, eos_token_ids=(EOS,))
PROMPT = [10, 11, 12]


def scoring(*, partial: bytes = b"", prompt: list[int] = PROMPT, **sampling: Any) -> PromptScoring:
    assignment = Assignment(
        attempt=AttemptRef("run", "rollout", "attempt"),
        policy="p",
        prompt_ids=pack_ids(prompt),
        partial=partial,
        sampling=msgspec.convert({"max_tokens": 1, **sampling}, Sampling),
        prompt_logprobs=2,
    )
    return PromptScoring(assignment, INFO, lambda ids: "".join(map(chr, ids)))


def made(token: int = 20, prompt: list[int] = PROMPT, alternatives: int = 2) -> TokenDelta:
    scores = script_scores(ScriptedSettings(), [*prompt, token], alternatives)
    return TokenDelta([token], [-0.25], [7], FinishReason.LENGTH, scores)


def test_the_engine_is_asked_for_scores_and_one_token() -> None:
    request = scoring(temperature=0.5, stop_token_ids=[9]).request()
    assert list(request.token_ids) == PROMPT
    assert (request.prompt_logprobs, request.max_tokens, request.temperature) == (2, 1, 0.5)
    assert list(request.stop_token_ids) == [EOS, 9]


@pytest.mark.parametrize(("token", "reason"), [(20, FinishReason.LENGTH), (EOS, FinishReason.STOP)])
def test_scores_and_token_are_packed_together(token: int, reason: FinishReason) -> None:
    one, delta = scoring(), made(token)
    packed = one.accept(delta)
    found = unpack_scores(packed, 3, 2)
    assert delta.scores is not None
    assert np.array_equal(found.places, delta.scores)
    assert found.token.tolist() == [(token, -0.25, 7)]
    assert one.finish is reason
    assert one.generated(packed) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        TokenDelta([20], [-0.25], [7], FinishReason.LENGTH),
        made(prompt=[10, 11]),
        made(prompt=[10, 11, 13]),
        made(alternatives=1),
        made()._replace(ids=[20, 21]),
        made()._replace(ids=[21]),
    ],
)
def test_an_engine_that_answers_something_else_fails_the_attempt(wrong: TokenDelta) -> None:
    one = scoring()
    with pytest.raises(Internal, match=r"the engine (did not score|scored another)"):
        one.accept(wrong)
    assert one.finish is None


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"partial": pack_tokens([5], [-0.5], 1)}, "partial"),
        ({"max_tokens": 2}, "sampling.max_tokens"),
        ({"prompt": []}, "prompt_ids"),
        ({"prompt": [5] * 64}, "prompt_ids"),
        ({"prompt": [128]}, "prompt_ids"),
        ({"seed": 3}, "sampling.seed"),
    ],
)
def test_an_assignment_that_cannot_be_scored_is_refused_by_its_field(more: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        scoring(**more)
    assert refused.value.field == field


def test_the_scripts_scores_depend_on_the_tokens_before_and_on_nothing_else() -> None:
    settings, ids = ScriptedSettings(vocab_size=50), list(range(3, 40))
    whole = script_scores(settings, ids, 4)
    assert whole.shape == (36, 5)
    assert np.array_equal(script_scores(settings, ids[:20], 4), whole[:19])
    assert np.array_equal(script_scores(settings, ids, 1), whole[:, :2])
    for (own, *others), token in zip(whole.tolist(), ids[1:], strict=True):
        assert own[0] == token
        assert [rank for _, _, rank in others] == [1, 2, 3, 4]
        assert own in others or own[2] > 4


def records(count: int) -> bytes:
    return bytes(count * TOKEN_BYTES)


def test_a_whole_output_waits_for_a_message_that_holds_all_of_it() -> None:
    """Else a lost worker, or a lost store, could leave a half that no other worker can go on with."""
    assert MAX_RECORDS <= MESSAGE_TOKENS
    outbox = Outbox(flush_tokens=8, flush_interval_s=0.1)
    for name, count, whole in (("a", MESSAGE_TOKENS - 5, False), ("b", 10, True), ("c", MAX_RECORDS, True)):
        outbox.open(AttemptRef("run", name, name), b"", whole=whole)
        outbox.append(name, records(count), 1.0)
        outbox.finish(name, FinishReason.LENGTH, 1.0)
    sent = [[(one.ref.attempt_id, len(one.tokens) // TOKEN_BYTES) for one in outbox.take(2.0).deltas] for _ in range(3)]
    assert sent == [[("a", MESSAGE_TOKENS - 5)], [("b", 10), ("c", MAX_RECORDS)], []]
