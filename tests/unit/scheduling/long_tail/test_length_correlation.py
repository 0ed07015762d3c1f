"""Whether it is found how alike the samples of a group are."""

from math import sqrt
from random import Random

import pytest

from ebbtide.scheduling.long_tail.length_correlation import ScoredGroup, group_share


def scored(draw: Random, share: float, *, size: int = 8, limit: float = 9.0) -> ScoredGroup:
    shared = sqrt(share) * draw.gauss()
    scores = [shared + sqrt(1.0 - share) * draw.gauss() for _ in range(size)]
    return ScoredGroup([one for one in scores if one <= limit], [limit for one in scores if one > limit])


@pytest.mark.parametrize("share", [0.2, 0.6, 0.9])
@pytest.mark.parametrize("size", [4, 16])
def test_the_share_that_groups_have_in_common_is_found(share: float, size: int) -> None:
    draw = Random(1)
    groups = [scored(draw, share, size=size) for _ in range(400)]
    assert group_share(groups) == pytest.approx(share, abs=0.06)


@pytest.mark.parametrize("share", [0.2, 0.8])
def test_so_it_is_if_many_samples_were_stopped(share: float) -> None:
    draw = Random(2)
    assert group_share([scored(draw, share, limit=0.5) for _ in range(120)]) == pytest.approx(share, abs=0.12)


def test_without_groups_of_two_it_is_a_half() -> None:
    assert group_share([]) == pytest.approx(0.5, abs=0.01)
    assert group_share([ScoredGroup([0.3])] * 50) == pytest.approx(0.5, abs=0.01)
