"""A relay says in one bit for each blob what a version still lacks."""

import pytest

from ebbtide.weights import mark_missing, read_missing

BLOBS = [bytes([n]) * 32 for n in range(20)]


@pytest.mark.parametrize("missing", [[], [0], [19], [7, 8], [0, 3, 15, 16], list(range(20))])
def test_what_is_marked_is_read(missing: list[int]) -> None:
    lacking = [BLOBS[at] for at in missing]
    bits = mark_missing(BLOBS, set(BLOBS) - set(lacking))
    assert read_missing(BLOBS, [bits]) == lacking
    assert len(bits) <= 3


def test_of_answers_at_different_times_the_last_one_counts() -> None:
    early, late = mark_missing(BLOBS, BLOBS[:5]), mark_missing(BLOBS, BLOBS[:18])
    assert read_missing(BLOBS, [early, late]) == read_missing(BLOBS, [late, early]) == BLOBS[18:]


def test_half_a_million_blobs_fit_into_a_message() -> None:
    blobs = [n.to_bytes(32, "little") for n in range(500_000)]
    assert len(mark_missing(blobs, ())) == 62_500
