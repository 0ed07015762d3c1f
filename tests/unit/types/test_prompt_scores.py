"""Scores of a prompt are packed whole, and a reader tells a whole from anything else."""

import numpy as np
import pytest

from ebbtide.errors import InvalidRequest, Unavailable
from ebbtide.types.tokens import (
    MAX_RECORDS,
    SCORE,
    TOKEN_BYTES,
    ScoreArray,
    check_records,
    pack_scores,
    pack_tokens,
    record_count,
    score_places,
    unpack_scores,
)

TOKEN = pack_tokens([9], [-0.5], 4)


def places(prompt_tokens: int, alternatives: int, first: float = -1.0) -> ScoreArray:
    count = prompt_tokens * (1 + alternatives)
    return score_places(range(count), first - np.arange(count) / 8, range(1, count + 1), alternatives)


@pytest.mark.parametrize(("prompt_tokens", "alternatives"), [(1, 0), (1, 3), (5, 0), (5, 2)])
def test_scores_come_back_as_they_were_packed(prompt_tokens: int, alternatives: int) -> None:
    wanted = places(prompt_tokens, alternatives)
    packed = pack_scores(wanted, TOKEN)
    assert len(packed) == record_count(prompt_tokens, alternatives) * TOKEN_BYTES
    found = unpack_scores(packed, prompt_tokens, alternatives)
    assert np.array_equal(found.places, wanted)
    assert found.token.tolist() == [(9, -0.5, 4)]
    assert found.version == 4


def test_a_score_is_as_long_as_a_token() -> None:
    assert SCORE.itemsize == TOKEN_BYTES


@pytest.mark.parametrize("other", [pack_tokens([9], [-0.5], 4), b"", pack_scores(places(4, 1), TOKEN)])
def test_what_an_older_fleet_answers_is_no_score(other: bytes) -> None:
    with pytest.raises(Unavailable, match="was not scored as a whole"):
        unpack_scores(other, 5, 1)


def test_parts_of_two_scorings_are_refused() -> None:
    first, second = (pack_scores(places(5, 1, first=logprob), TOKEN) for logprob in (-1.0, -2.0))
    mixed = [first[:cut] + second[cut:] for cut in range(TOKEN_BYTES, len(first) - TOKEN_BYTES, TOKEN_BYTES)]
    for parts in (*mixed, first[:-TOKEN_BYTES] + pack_tokens([9], [-0.5], 5)):
        with pytest.raises(Unavailable, match="scored anew while its scores were read; try again"):
            unpack_scores(parts, 5, 1)


def test_more_scores_than_one_message_holds_are_refused() -> None:
    check_records(MAX_RECORDS - 2, 0, field="prompt_logprobs")
    with pytest.raises(InvalidRequest, match=r"prompt_logprobs: 131071 tokens with 0 alternatives .* fewer tokens"):
        check_records(MAX_RECORDS - 1, 0, field="prompt_logprobs")
    with pytest.raises(InvalidRequest, match="ask for fewer alternatives"):
        check_records(7000, 20, field="prompt_logprobs")
