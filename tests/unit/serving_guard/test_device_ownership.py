"""A trainer's device always has a user, and each lease of a run only as long as there is no newer one."""

import random

import pytest

from ebbtide.errors import NotReady, Superseded
from ebbtide.serving_guard.device_ownership import DeviceClaim, DeviceOwnership, OwnerLease

SETTLE_S, SILENT_S, REJOIN_S = 5.0, 15.0, 1.0


def ownership(settle_s: float = SETTLE_S) -> DeviceOwnership:
    return DeviceOwnership(0.0, settle_s=settle_s, silent_s=SILENT_S, rejoin_s=REJOIN_S)


def lease(number: int, run: str = "r", owner: str = "a") -> OwnerLease:
    return OwnerLease(run, number, owner)


def test_a_new_guard_lends_only_once_an_owner_had_the_time_to_come_back() -> None:
    made = ownership()
    assert made.state(SETTLE_S - 0.01) == "settling"
    assert not made.lends(SETTLE_S - 0.01)
    assert made.lends(SETTLE_S)


def test_the_wish_of_an_owner_that_lives_counts_at_once() -> None:
    made = ownership()
    claim = made.claim(1.0, lease(1), lends=False)
    assert made.state(SETTLE_S + 1.0) == "held"
    made.wish(7.0, claim, lends=True)
    assert made.state(7.0) == "lent"
    made.wish(8.0, claim, lends=False)
    assert not made.lends(8.0)


def test_the_device_of_a_silent_owner_is_lent_until_it_speaks_again() -> None:
    made = ownership()
    claim = made.claim(1.0, lease(1), lends=False)
    assert not made.lends(1.0 + SILENT_S - 0.01)
    assert made.state(1.0 + SILENT_S) == "abandoned"
    assert made.lends(1.0 + SILENT_S)
    made.wish(30.0, claim, lends=False)
    assert made.state(30.0) == "held"


def test_an_owner_whose_stream_broke_has_a_moment_to_come_back_with_the_same_lease() -> None:
    made = ownership()
    claim = made.claim(1.0, lease(1), lends=False)
    made.broke(2.0, claim)
    assert made.state(2.0 + REJOIN_S - 0.01) == "held"
    assert made.lends(2.0 + REJOIN_S)
    made.claim(9.0, lease(1), lends=False)
    assert made.state(9.0) == "held"


def test_a_newer_lease_replaces_the_older_one_for_good() -> None:
    made = ownership()
    old = made.claim(1.0, lease(1), lends=False)
    new = made.claim(2.0, lease(2, owner="b"), lends=False)
    with pytest.raises(Superseded, match="step down"):
        made.wish(3.0, old, lends=True)
    made.broke(3.0, old)
    assert made.state(3.0 + REJOIN_S) == "held"
    made.broke(4.0, new)
    with pytest.raises(Superseded, match="newer lease"):
        made.claim(100.0, lease(1), lends=False)


def test_holders_of_one_number_do_not_take_the_device_from_each_other_while_one_lives() -> None:
    made = ownership()
    claim = made.claim(1.0, lease(0), lends=False)
    with pytest.raises(Superseded):
        made.claim(2.0, lease(0, owner="b"), lends=False)
    made.broke(3.0, claim)
    made.claim(3.0 + REJOIN_S, lease(0, owner="b"), lends=False)
    with pytest.raises(Superseded):
        made.claim(5.0, lease(0), lends=False)


def test_another_run_waits_until_the_owner_is_gone() -> None:
    made = ownership()
    claim = made.claim(1.0, lease(7), lends=True)
    with pytest.raises(NotReady, match="run r owns this device"):
        made.claim(2.0, lease(1, run="s"), lends=False)
    made.broke(3.0, claim)
    made.claim(3.0 + REJOIN_S, lease(1, run="s"), lends=False)
    assert made.owner == lease(1, run="s")


def test_a_store_that_was_wiped_counts_from_one_again_after_a_while() -> None:
    made = ownership()
    made.broke(2.0, made.claim(1.0, lease(9), lends=False))
    with pytest.raises(Superseded):
        made.claim(100.0, lease(1, owner="b"), lends=False)
    made.claim(1_000.0, lease(1, owner="b"), lends=False)
    assert made.state(1_000.0) == "held"


def test_whatever_happens_an_owner_that_lives_and_holds_its_device_never_shares_it() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        now = 0.0
        made = ownership(settle_s=draw.choice([0.0, SETTLE_S]))
        claims: list[DeviceClaim] = []
        heard: dict[int, tuple[float, bool]] = {}  # newest wish of each claim
        for _ in range(40):
            now += draw.expovariate(1.0)
            lends = draw.random() < 0.5
            try:
                if not claims or draw.random() < 0.3:
                    owner = lease(draw.randint(1, 4), run=draw.choice("rs"), owner=draw.choice("ab"))
                    claims.append(made.claim(now, owner, lends=lends))
                    heard = {len(claims) - 1: (now, lends)}
                elif draw.random() < 0.2:
                    made.broke(now, claims[-1])
                    heard.clear()
                else:
                    at = draw.randrange(len(claims))
                    made.wish(now, claims[at], lends=lends)
                    heard[at] = now, lends
            except (Superseded, NotReady):
                pass
            assert len(heard) <= 1, "one connection counts"
            for heard_at, wished in heard.values():
                assert made.lends(now) is (wished or now - heard_at >= SILENT_S)
            assert made.lends(now + SETTLE_S + SILENT_S), "a device without a sign of life has a user"
