"""What rank 0 does with a relay that does not go on, and what one rank's error is when another tells it."""

from collections import Counter

import pytest

from ebbtide.client.publisher.rank_exchange import RankFailure, RankPut, pack, unpack
from ebbtide.errors import Draining, EbbtideError, Internal, InvalidRequest, NoCapacity, NotReady
from ebbtide.types.weights import Manifest
from ebbtide.weights import tile_sizes
from tests.unit.client.ranks import MemoryRelay, tensor


@pytest.mark.parametrize("lacking", [1, 3])
async def test_a_relay_that_lacks_what_nobody_has_is_given_up_after_some_tries(
    lacking: int, relay: MemoryRelay
) -> None:
    relay.former = True
    relay.lacks = lambda manifest: [bytes([n]) * 32 for n in range(lacking)]
    publishing = await relay.publisher().publish([tensor("w")])
    with pytest.raises(NotReady, match=f"still lacks {lacking} blobs"):
        await publishing
    assert 2 < relay.begun < 10
    assert not relay.committed


async def test_a_relay_that_lacks_less_each_time_is_not_given_up(relay: MemoryRelay) -> None:
    def lacks(manifest: Manifest) -> list[bytes]:
        return [bytes([n]) * 32 for n in range(12 - relay.begun)]

    relay.former, relay.lacks = True, lacks
    assert (await (await relay.publisher().publish([tensor("w")]))).version == 1


async def test_a_blob_that_the_relay_takes_and_always_calls_missing_is_put_three_times(relay: MemoryRelay) -> None:
    relay.lacks, relay.forgets = lambda manifest: list(tile_sizes(manifest)), True
    publishing = await relay.publisher().publish([tensor("w", 1), tensor("v", 2)])
    with pytest.raises(Internal, match=r"has taken 2 blobs 3 times .* and calls them missing"):
        await publishing
    assert sorted(Counter(relay.puts).values()) == [3, 3]
    assert not relay.committed


@pytest.mark.parametrize(
    "error",
    [
        NoCapacity("full", retry_after_s=7.5),
        InvalidRequest("is wrong", field="w"),
        Draining("leaving"),
        Internal("see the log"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_is_told_is_the_same_where_it_is_heard(error: EbbtideError) -> None:
    heard = unpack(pack(1, RankPut(failure=RankFailure.of(error))), 1, RankPut).failure
    assert heard
    again = heard.error()
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_any_other_error_is_told_as_an_internal_one() -> None:
    assert isinstance(RankFailure.of(ZeroDivisionError("by zero")).error(), Internal)
