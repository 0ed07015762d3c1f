"""What is expected of a response that is not finished."""

import random
from typing import Any

import pytest

from ebbtide.scheduling.dispatch.response_lengths import ResponseLengths


@pytest.mark.parametrize("made", [0, 300, 2_000, 8_000])
@pytest.mark.parametrize("seed", range(5))
def test_the_rest_is_the_mean_of_what_longer_ones_still_made(seed: Any, made: Any) -> None:
    draw, lengths = random.Random(seed), ResponseLengths()
    known = [int(draw.lognormvariate(6.8, 1.0)) + 1 for _ in range(8_000)]
    for tokens in known:
        lengths.finished(tokens)
    longer = [tokens - made for tokens in known if tokens > made]
    assert lengths.rest(made) == pytest.approx(sum(longer) / len(longer), rel=0.25)


def test_the_longer_a_response_of_a_heavy_tail_has_grown_the_longer_it_will_grow() -> None:
    draw, lengths = random.Random(1), ResponseLengths()
    for _ in range(8_000):
        lengths.finished(int(draw.lognormvariate(6.8, 1.2)))
    rests = [lengths.rest(made) for made in (1_000, 3_000, 10_000)]
    assert rests == sorted(rests)


def test_nothing_known_means_as_far_from_the_end_as_from_the_start() -> None:
    lengths = ResponseLengths()
    assert lengths.rest(0) > 0.0
    assert lengths.rest(5_000) == 5_000.0
    assert lengths.rest(5_000, budget=100) == 100.0


def test_what_is_new_outweighs_what_is_old() -> None:
    lengths = ResponseLengths()
    for tokens in [100] * 20_000 + [4_000] * 60_000:
        lengths.finished(tokens)
    assert lengths.rest(0) > 3_000.0


def test_a_length_of_any_size_is_taken() -> None:
    lengths = ResponseLengths()
    for tokens in (0, 1, 10**9):
        lengths.finished(tokens)
    assert lengths.rest(10**9) > 0.0
