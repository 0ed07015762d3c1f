"""Downloads over shared links end, however late in a scenario they begin."""

from functools import partial

import pytest

from ebbtide.simulator.world.fleet.version_pulls import SharedLinks
from ebbtide.simulator.world.virtual_time import VirtualTime


@pytest.mark.parametrize("begin_s", [0.0, 2_253.9, 8.6e4 / 3, 1e8 / 3])
def test_downloads_end_when_their_last_bytes_take_less_than_time_can_tell(begin_s: float) -> None:
    time, ended = VirtualTime(), list[int]()
    links = SharedLinks(time, 25e9)

    def begin(index: int) -> None:
        links.download(8e8 + index * 7, 6.25e9 + index, lambda: ended.append(index))

    for index in range(50):
        time.at(begin_s + index / 70, partial(begin, index))
    for _ in range(1_000):
        if len(ended) == 50:
            break
        time.step()
    assert sorted(ended) == list(range(50))
    assert time.now == pytest.approx(begin_s + 50 * 8e8 / 25e9, abs=2.0)
