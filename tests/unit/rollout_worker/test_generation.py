"""A response ends where its tokens say, wherever it was cut."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker.engine import DraftSource, TokenDelta
from ebbtide.rollout_worker.generation.generation import Assignment, Generation
from ebbtide.types.fleet import AttemptRef, EngineInfo
from ebbtide.types.rollout import FinishReason
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import pack_ids, pack_tokens, unpack_tokens

EOS = 1
INFO = EngineInfo(model="m", vocab_size=256, max_model_len=64, eos_token_ids=(EOS,))
REF = AttemptRef("run", "rollout", "attempt")


def decode(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def assignment(partial: Sequence[int] = (), *, prompt: Sequence[int] = (10, 11, 12), **sampling: Any) -> Assignment:
    packed = pack_tokens(partial, [-0.5] * len(partial), 1)
    wanted = msgspec.convert({"max_tokens": 16, **sampling}, Sampling)
    return Assignment(attempt=REF, policy="p", prompt_ids=pack_ids(prompt), partial=packed, sampling=wanted)


def begin(partial: Sequence[int] = (), **sampling: Any) -> Generation:
    return Generation(assignment(partial, **sampling), INFO, decode)


def delta(ids: Sequence[int], finish: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(ids, [-0.25] * len(ids), [7] * len(ids), finish)


def ending(ids: Sequence[int], cut: int, **sampling: Any) -> tuple[int, FinishReason | None]:
    """Length and finish of a response that would be `ids`, cut after `cut` tokens and resumed."""
    generation = begin(ids[:cut], **sampling)
    length = cut
    for token in ids[cut:]:
        if generation.finish is not None:
            break
        length += len(unpack_tokens(generation.accept(delta([token]))))
    return length, generation.finish


def test_the_engine_is_asked_for_what_is_left() -> None:
    request = begin([20, 21, 22, 23, 24], max_tokens=16, min_tokens=8, temperature=0.5, stop_token_ids=[9]).request()
    assert list(request.token_ids) == [10, 11, 12, 20, 21, 22, 23, 24]
    assert (request.max_tokens, request.min_tokens) == (11, 3)
    assert list(request.stop_token_ids) == [EOS, 9]
    assert request.temperature == 0.5
    assert request.request_id == "attempt"


def test_drafts_come_from_the_group_that_the_coordinator_names() -> None:
    wanted = msgspec.structs.replace(assignment([20]), group_id="g")
    drafts = Generation(wanted, INFO, decode).request().drafts
    assert drafts == DraftSource(group="g", rollout_id="rollout", made=1)


def test_the_context_bounds_the_response() -> None:
    assert begin(max_tokens=1000).request().max_tokens == 61
    assert begin(range(20, 40), max_tokens=1000).request().max_tokens == 41


def long(partial: Sequence[int] = (), *, context: int, **sampling: Any) -> Generation:
    """A response in a run with a context of `context` tokens, on an engine that has 64."""
    wanted = assignment(partial, **{"max_tokens": 1000, **sampling})
    return Generation(msgspec.structs.replace(wanted, max_model_len=context), INFO, decode)


@pytest.mark.parametrize("told", [None, FinishReason.LENGTH])
def test_a_response_that_fills_a_context_shorter_than_the_runs_has_not_ended(told: FinishReason | None) -> None:
    generation = long(range(20, 79), context=70)
    request = generation.request()
    assert (request.max_tokens, generation.outgrown) == (2, False)
    generation.accept(delta([80, 81], told))
    assert (generation.finish, generation.outgrown) == (None, True)


@pytest.mark.parametrize("partial", [(), range(20, 30)])
@pytest.mark.parametrize("context", [2, 3, 12])
def test_what_is_longer_than_the_runs_context_was_known_to_be_needs_a_longer_one(
    partial: Sequence[int], context: int
) -> None:
    generation = long(partial, context=context)
    beyond = 3 + len(partial) >= context
    assert (generation.finish, generation.outgrown) == (None, beyond)
    assert beyond or generation.request().max_tokens == context - 3


def test_a_response_that_ends_with_the_last_token_of_a_short_context_has_ended() -> None:
    generation = long(range(20, 80), context=70)
    generation.accept(delta([EOS], FinishReason.STOP))
    assert (generation.finish, generation.outgrown) == (FinishReason.STOP, False)


def test_an_engine_is_asked_for_no_more_end_free_tokens_than_its_context_holds() -> None:
    request = long(range(20, 70), context=200, min_tokens=100).request()
    assert (request.max_tokens, request.min_tokens) == (11, 11)


@pytest.mark.parametrize("context", [40, 64])
def test_the_runs_context_ends_a_response_where_the_engine_could_go_on(context: int) -> None:
    generation = long(range(20, 50), context=context)
    assert generation.request().max_tokens == context - 33
    generation.accept(delta([80] * (context - 33)))
    assert (generation.finish, generation.outgrown) == (FinishReason.LENGTH, False)


def test_tokens_are_kept_with_logprob_and_version() -> None:
    tokens = unpack_tokens(begin().accept(TokenDelta([5, 6], [-0.5, -1.5], [3, 4])))
    assert tokens["id"].tolist() == [5, 6]
    assert tokens["logprob"].tolist() == [-0.5, -1.5]
    assert tokens["version"].tolist() == [3, 4]


@pytest.mark.parametrize("cut", range(7))
def test_end_of_sequence_ends_it_wherever_it_was_cut(cut: int) -> None:
    ids = [20, 21, 22, 23, 24, EOS]
    assert ending([*ids, 30, 31], cut) == (6, FinishReason.STOP)


@pytest.mark.parametrize("cut", range(5))
def test_the_budget_ends_it_wherever_it_was_cut(cut: int) -> None:
    assert ending([20, 21, 22, 23, 24], cut, max_tokens=4) == (4, FinishReason.LENGTH)


@pytest.mark.parametrize("cut", range(12))
def test_a_stop_string_over_the_cut_ends_it(cut: int) -> None:
    ids = [*b"one two", *b" END", *b" more"]
    assert ending(ids, cut, stop=["\n\n", "END"]) == (11, FinishReason.STOP)


@pytest.mark.parametrize("cut", range(9))
def test_nothing_stops_it_within_min_tokens(cut: int) -> None:
    ids = [20, EOS, *b"END", 21, EOS, *b"END", 22]
    assert ending(ids, cut, min_tokens=7, stop=["END"], ignore_eos=True) == (10, FinishReason.STOP)
    if cut <= 7:
        assert ending(ids, cut, min_tokens=6) == (7, FinishReason.STOP)


def test_a_long_response_finds_its_stop_string() -> None:
    ids = [20] * 40 + list(b"stop")
    assert ending(ids, 41, stop=["stop"], max_tokens=60) == (44, FinishReason.STOP)


def test_what_an_engine_made_beyond_the_end_is_left_out() -> None:
    generation = begin(stop=["END"])
    tokens = unpack_tokens(generation.accept(delta([*b"xEND", 20, 21])))
    assert decode(tokens["id"].tolist()) == "xEND"
    assert generation.finish is FinishReason.STOP


def test_end_tokens_are_ordinary_where_they_are_ignored() -> None:
    assert ending([20, EOS, 21], 0, ignore_eos=True, max_tokens=3) == (3, FinishReason.LENGTH)
    assert EOS not in begin(ignore_eos=True).request().stop_token_ids


def test_stop_tokens_outside_the_vocabulary_never_reach_the_engine() -> None:
    assert list(begin(stop_token_ids=[9, 256, 1 << 31]).request().stop_token_ids) == [EOS, 9]


def test_the_engine_may_end_it_too() -> None:
    generation = begin()
    generation.accept(delta([20], FinishReason.LENGTH))
    assert generation.finish is FinishReason.LENGTH


@pytest.mark.parametrize("bounds", [(0, 0), (3, 0), (0, 3), (3, 3), (2, 4)])
def test_bounds_admit_versions(bounds: tuple[int, int]) -> None:
    wanted = msgspec.structs.replace(assignment(), min_version=bounds[0], max_version=bounds[1])
    low, high = bounds[0], bounds[1] or 100
    assert [version for version in range(1, 8) if wanted.admits(version)] == [
        version for version in range(1, 8) if low <= version <= high
    ]


@pytest.mark.parametrize(
    ("prompt", "partial", "what"),
    [((), (), "empty prompt"), (range(64), (), "no room"), ((256,), (), "token 256"), ((10,), (300,), "token 300")],
)
def test_what_this_engine_cannot_take_is_refused_by_name(
    prompt: Sequence[int], partial: Sequence[int], what: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"prompt_ids: .*{what}"):
        Generation(assignment(partial, prompt=prompt), INFO, decode)
