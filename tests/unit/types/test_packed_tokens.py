"""A few tokens are packed otherwise than many, into the same bytes."""

import math
from typing import Any, Final

import numpy as np
import pytest

from ebbtide.types.tokens import TOKEN_BYTES, pack_tokens, unpack_tokens

COLUMNS: Final[tuple[list[Any], ...]] = ([0, 7, 2**32 - 1], [0.0, -1.0 / 3, -math.inf], [0, 1, 2**32 - 1])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_lists_of_a_few_tokens_are_the_records_that_arrays_are(count: int) -> None:
    lists = [column[:count] for column in COLUMNS]
    packed = pack_tokens(*lists)
    assert packed == pack_tokens(*map(np.array, lists))
    assert len(packed) == count * TOKEN_BYTES


def test_a_logprob_that_nobody_asked_for_stays_none() -> None:
    assert math.isnan(unpack_tokens(pack_tokens([1], [math.nan], [2]))["logprob"][0])


def test_a_logprob_beyond_32_bits_is_infinite_as_in_an_array() -> None:
    with np.errstate(over="ignore"):
        assert unpack_tokens(pack_tokens([1], [-1e300], [2]))["logprob"][0] == -math.inf


def test_an_id_that_is_none_is_refused() -> None:
    with pytest.raises(OverflowError):
        pack_tokens([-1], [0.0], [2])


@pytest.mark.parametrize("lengths", [(3, 2, 3), (3, 3, 2), (2, 3, 3), (3, 1, 3)])
def test_no_token_is_lost_for_want_of_a_logprob_or_a_version(lengths: tuple[int, int, int]) -> None:
    lists = [column[:length] for column, length in zip(COLUMNS, lengths, strict=True)]
    with pytest.raises(ValueError, match=f"{lengths[0]} ids, {lengths[1]} logprobs and {lengths[2]} versions"):
        pack_tokens(*lists)
