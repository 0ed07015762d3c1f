"""What holders tell is kept while it is fresh, and who failed is passed over."""

import time

import pytest

from ebbtide.errors import InvalidRequest, NoCapacity
from ebbtide.transfer.version_finder import PathRequest
from ebbtide.types.weights import NAME_CHARS, SITE_CHARS, Holder, WeightsState
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.weight_relay import holder_table as module
from ebbtide.weight_relay.holder_table import AGAIN_S, LOST_S, HolderTable
from ebbtide.weight_relay.source_ranking import SEVERAL, BlobOrigin
from ebbtide.wire import from_proto, to_proto
from tests.fakes.clocks import SetClock

STREAM = ("run", "policy")


@pytest.fixture
def clock() -> SetClock:
    return SetClock(100.0)


@pytest.fixture
def holders(clock: SetClock) -> HolderTable:
    return HolderTable(BlobOrigin(site="home", trainers=True), clock=clock)


def ask(
    name: str, *, run: str = "run", site: str = "a", done: bool = False, lasting: bool = False, **more: object
) -> PathRequest:
    holder = Holder(name=name, site=site, address=f"{name}:1", lasting=lasting)
    return PathRequest(run_id=run, policy="policy", holder=holder, done=done, **more)  # type: ignore[arg-type]


def addresses(holders: HolderTable, request: PathRequest) -> list[str]:
    return [source.address for source in holders.told(request, 5)]


def test_the_first_of_a_site_reads_here_and_the_next_reads_from_the_first(holders: HolderTable) -> None:
    assert addresses(holders, ask("w0")) == [""]
    assert addresses(holders, ask("w1")) == ["w0:1"]
    assert addresses(holders, ask("other", site="b")) == [""]
    assert addresses(holders, ask("w0")) == [""]


def test_a_dead_seed_is_replaced_at_once_for_those_it_failed_and_for_all_when_it_is_silent(
    holders: HolderTable, clock: SetClock
) -> None:
    for name in ("w0", "w1", "w2"):
        holders.told(ask(name), 5)
    assert addresses(holders, ask("w1", failed=("w0:1",))) == [""]
    clock.now += LOST_S - 1
    assert addresses(holders, ask("w1")) == [""]
    assert addresses(holders, ask("w2")) == ["w0:1", "w1:1"]
    clock.now += AGAIN_S
    assert addresses(holders, ask("w1")) == [""]
    assert addresses(holders, ask("w2")) == ["w1:1"]


def test_an_address_that_failed_several_is_named_to_nobody(holders: HolderTable) -> None:
    holders.told(ask("bad", done=True), 5)
    for number in range(SEVERAL):
        assert addresses(holders, ask(f"w{number}", failed=("bad:1",)))[0] != "bad:1"
    assert "bad:1" not in addresses(holders, ask("new"))


def test_one_that_lost_what_it_held_stands_behind_its_readers(holders: HolderTable) -> None:
    holders.told(ask("w0", done=True), 5)
    assert addresses(holders, ask("w1")) == ["w0:1"]
    assert addresses(holders, ask("w0")) == ["w1:1"]
    assert addresses(holders, ask("w1")) == [""]


def test_who_is_done_needs_no_sources_and_counts_as_a_copy_if_it_lasts(holders: HolderTable) -> None:
    assert holders.told(ask("kept", done=True, lasting=True), 5) == []
    assert holders.told(ask("spot", done=True), 5) == []
    holders.told(ask("slow"), 5)
    assert (holders.lasting(STREAM, 5), holders.fetching(STREAM, 5)) == (1, 1)


def test_who_has_a_version_in_its_engine_alone_needs_the_way_from_it_and_is_nothing_else(holders: HolderTable) -> None:
    holders.told(ask("w0"), 5)
    assert addresses(holders, ask("w1")) == ["w0:1"]
    held = Holder(name="w0", site="a", lasting=True)  # without an address
    assert holders.told(PathRequest(run_id="run", policy="policy", holder=held, done=True), 5) == []
    assert holders.needed() == {(STREAM, 5)}
    assert addresses(holders, ask("w1")) == [""]
    assert (holders.fetching(STREAM, 5), holders.lasting(STREAM, 5)) == (1, 0)


def test_versions_that_live_holders_have_or_fetch_are_needed(holders: HolderTable, clock: SetClock) -> None:
    holders.told(ask("w0", have=(2, 3)), 5)
    assert holders.needed() == {(STREAM, 2), (STREAM, 3), (STREAM, 5)}
    clock.now += LOST_S
    assert holders.needed() == set()


def test_what_is_shown_of_a_holder_is_what_it_told_last(holders: HolderTable, clock: SetClock) -> None:
    holders.told(ask("w0", done=True), 5)
    clock.now += 2.0
    holders.told(ask("w1"), 5)
    holders.told(ask("w1", done=True, install_s=0.25), 5)
    shown = [(s.holder.name, s.version, s.done, s.install_s, s.seen_s) for s in holders.states("run")[0]]
    assert shown == [("w0", 5, True, 0.0, 2.0), ("w1", 5, True, 0.25, 0.0)]
    assert holders.states("another") == ([], 0)


def test_of_many_holders_those_heard_of_last_are_shown(
    holders: HolderTable, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SHOWN", 2)
    for name in ("b", "c", "a"):
        holders.told(ask(name), 5)
        clock.now += 1.0
    states, more = holders.states("run")
    assert ([state.holder.name for state in states], more) == (["a", "c"], 1)


def test_the_longest_names_of_all_that_are_shown_fit_into_a_message(holders: HolderTable) -> None:
    for number in range(module.MAX_SHOWN + 1):
        long = Holder(
            name=f"{number:04}" + "\U0001d11e" * (NAME_CHARS - 4),
            site="\U0001d11e" * SITE_CHARS,
            host="\U0001d11e" * 256,
            address="a" * 510 + ":1",
        )
        holders.told(PathRequest(run_id="r" * 64, policy="p" * 64, holder=long), 5)
    states, more = holders.states("r" * 64)
    message = to_proto(WeightsState(holders=tuple(states), more_holders=more), pb.DescribeVersionsResponse)
    assert more == 1
    assert message.ByteSize() < (4 << 20) - (512 << 10), "room for versions and links"


def test_the_newest_of_very_many_versions_are_remembered(holders: HolderTable) -> None:
    holders.told(ask("w0", have=tuple(range(1, 1001))), 5)
    kept = {version for _, version in holders.needed()} - {5}
    assert kept == set(range(1001 - module.MAX_HAVE, 1001))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e300, -1.0])
@pytest.mark.parametrize("field", ["install_s", "bytes_per_s"])
def test_no_number_that_cannot_be_is_taken_from_a_holder(field: str, number: float) -> None:
    holder = pb.Holder(name="w0", address="w0:1")
    request = pb.FindWayRequest(run_id="run", policy="policy", holder=holder, **{field: number})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=field):
        from_proto(request, PathRequest)


def test_holders_are_bounded(holders: HolderTable, clock: SetClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_COPIES", 3)
    for name in ("w0", "w1", "w2"):
        holders.told(ask(name), 5)
    for now in (0.0, 1.0):
        clock.now += now
        with pytest.raises(NoCapacity):
            holders.told(ask("w3"), 5)
        holders.told(ask("w0", done=True), 5)
        holders.told(ask("w0"), 5)
    assert {state.holder.name for state in holders.states("run")[0]} == {"w0", "w1", "w2"}
    clock.now += LOST_S
    holders.told(ask("w3"), 5)


def test_the_many_holders_of_one_run_keep_those_of_no_other_run_out(
    holders: HolderTable, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_COPIES", 6)
    for number in range(6):
        holders.told(ask(f"fake{number}", run="greedy"), 5)
        clock.now += 0.1
    holders.told(ask("fake0", run="greedy"), 5)
    for number in range(3):
        holders.told(ask(f"w{number}"), 5)
    kept = {run: {state.holder.name for state in holders.states(run)[0]} for run in ("greedy", "run")}
    assert kept == {"greedy": {"fake0", "fake4", "fake5"}, "run": {"w0", "w1", "w2"}}, "those heard of last stay"
    for run in ("greedy", "run"):
        with pytest.raises(NoCapacity):
            holders.told(ask("more", run=run), 5)
    assert addresses(holders, ask("w1")) == ["w0:1"]


def test_an_answer_costs_no_more_among_very_many_holders(holders: HolderTable) -> None:
    def cost_s(asker: str) -> float:
        """The least of a few: other processes disturb some."""
        costs = []
        for _ in range(20):
            began = time.thread_time()
            holders.told(ask(asker, site="b"), 5)
            costs.append(time.thread_time() - began)
        return min(costs)

    for number in range(100):
        holders.told(ask(f"w{number}", site="ab"[number % 2], done=number % 3 == 0), 5)
    few = cost_s("w1")
    for number in range(5000):
        holders.told(ask(f"fake{number}", site=f"{number % 7}", done=number % 3 == 0), 5)
    assert cost_s("w1") < 5 * few
