"""Trainers go round, one at a time; who dies, hangs or is silent in its turn loses it, and no other does."""

from random import Random

import pytest

from ebbtide.errors import Superseded
from ebbtide.serving_guard.device_ownership import DeviceClaim, OwnerLease
from ebbtide.serving_guard.turn_order import PASSES, Seat, TurnOrder, TurnTrainer

SILENT_S, REJOIN_S, TURN_S = 10.0, 2.0, 60.0


def order_of(**given: object) -> TurnOrder:
    return TurnOrder(0.0, **{"silent_s": SILENT_S, "rejoin_s": REJOIN_S, "turn_s": TURN_S} | given)  # type: ignore[arg-type]


def trainer(run_id: str, *, lease: int = 1, pid: int = 0, priority: int = 0) -> TurnTrainer:
    seats = (Seat(pid or 100 + sum(run_id.encode()), 7),)
    return TurnTrainer(lease=OwnerLease(run_id, lease, f"{run_id}{lease}"), seats=seats, priority=priority)


class Trainers:
    """Trainers that speak each second."""

    def __init__(self, order: TurnOrder) -> None:
        self.order, self.now = order, 0.0
        self.claims: dict[str, DeviceClaim] = {}
        self.trainers: dict[str, TurnTrainer] = {}

    def come(self, one: TurnTrainer, *, wants: bool = True) -> None:
        run_id = one.lease.run_id
        self.trainers[run_id], self.claims[run_id] = one, self.order.claim(self.now, one, wants=wants)

    def want(self, run_id: str, wants: bool = True) -> None:
        self.order.wish(self.now, self.claims[run_id], self.trainers[run_id], wants=wants)

    def next(self) -> str:
        began = self.order.review(self.now)
        return began.trainer.lease.run_id if began else ""

    def serve(self) -> str:
        """One whole turn, after which its trainer wants the next one."""
        run_id = self.next()
        self.want(run_id, False)
        self.want(run_id)
        return run_id


def test_trainers_that_always_wait_go_round() -> None:
    trainers = Trainers(order_of())
    for name in "abc":
        trainers.come(trainer(name))
    assert [trainers.serve() for _ in range(7)] == list("abcabca")


def test_the_device_is_free_only_while_nobody_waits() -> None:
    trainers = Trainers(order_of())
    trainers.come(trainer("a"), wants=False)
    trainers.come(trainer("b"), wants=False)
    assert trainers.next() == ""
    trainers.want("b")
    assert trainers.next() == "b"
    trainers.want("a")
    assert trainers.next() == ""
    trainers.want("b", False)
    assert trainers.next() == "a"


def test_higher_priority_goes_first_and_passes_others_over_a_bounded_number_of_times() -> None:
    trainers = Trainers(order_of())
    trainers.come(trainer("low"))
    trainers.come(trainer("high", priority=1))
    turns = [trainers.serve() for _ in range(2 * PASSES + 2)]
    assert turns == (["high"] * PASSES + ["low"]) * 2


def test_a_turn_ends_when_its_trainer_gives_it_back_and_numbers_rise() -> None:
    order = order_of(number=41)
    trainers = Trainers(order)
    trainers.come(trainer("a"))
    trainers.come(trainer("b"))
    assert trainers.next() == "a"
    assert order.turn is not None
    assert order.turn.number == 42
    assert order.has(trainers.claims["a"])
    assert not order.has(trainers.claims["b"])
    trainers.want("a", False)
    assert trainers.next() == "b"
    assert order.number == 43


def hang(trainers: Trainers) -> None:
    """a has its turn and is silent, b speaks."""
    trainers.now += SILENT_S + 0.1
    trainers.want("b")


def break_off(trainers: Trainers) -> None:
    trainers.order.broke(trainers.now, trainers.claims["a"])
    trainers.now += REJOIN_S
    trainers.want("b")


def keep(trainers: Trainers) -> None:
    for _ in range(int(TURN_S) + 1):
        trainers.now += 1.0
        trainers.want("a")
        trainers.want("b")


def supersede(trainers: Trainers) -> None:
    trainers.come(trainer("a", lease=2, pid=4711))


@pytest.mark.parametrize("fault", [hang, break_off, keep, supersede])
def test_a_turn_is_lost_but_the_next_begins_only_once_the_processes_are_gone(fault: object) -> None:
    trainers = Trainers(order_of())
    trainers.come(trainer("a"))
    trainers.come(trainer("b"))
    assert trainers.next() == "a"
    fault(trainers)  # type: ignore[operator]
    assert trainers.next() == ""
    assert trainers.order.lost
    assert trainers.order.turn is not None
    assert trainers.order.turn.trainer.lease == OwnerLease("a", 1, "a1")
    assert not trainers.order.has(trainers.claims["a"])
    trainers.order.gone()
    assert trainers.next() == "b"


def test_a_trainer_whose_stream_broke_for_a_moment_keeps_its_turn() -> None:
    trainers = Trainers(order_of())
    trainers.come(trainer("a"))
    assert trainers.next() == "a"
    trainers.order.broke(trainers.now, trainers.claims["a"])
    trainers.now += REJOIN_S / 2
    trainers.come(trainer("a"))
    trainers.now += REJOIN_S
    assert trainers.next() == ""
    assert not trainers.order.lost
    assert trainers.order.has(trainers.claims["a"])


def test_a_process_that_takes_its_run_up_again_keeps_the_turn_under_the_newer_lease() -> None:
    trainers = Trainers(order_of())
    trainers.come(trainer("a", lease=1, pid=7))
    assert trainers.next() == "a"
    old = trainers.claims["a"]
    trainers.come(trainer("a", lease=2, pid=7))
    assert trainers.order.has(trainers.claims["a"])
    assert not trainers.order.has(old)
    with pytest.raises(Superseded):
        trainers.order.check(old)


def test_an_older_lease_and_a_rival_of_the_same_number_are_refused() -> None:
    trainers = Trainers(order_of())
    trainers.come(trainer("a", lease=2))
    with pytest.raises(Superseded):
        trainers.order.claim(1.0, trainer("a", lease=1), wants=True)
    rival = TurnTrainer(lease=OwnerLease("a", 2, "another"), seats=(Seat(1234, 1),))
    with pytest.raises(Superseded):
        trainers.order.claim(1.0, rival, wants=True)
    order = order_of()
    order.remember([OwnerLease("a", 5, "x")], 0.0)
    with pytest.raises(Superseded):
        order.claim(1.0, trainer("a", lease=4), wants=True)


def test_a_new_guard_waits_for_the_trainer_in_its_turn_and_takes_the_turn_of_one_that_stays_away() -> None:
    before = Trainers(order_of())
    before.come(trainer("a"))
    before.next()
    for comes in (True, False):
        after = Trainers(order_of(number=1, turn=before.order.turn))
        after.come(trainer("b"))
        assert after.next() == ""
        if comes:
            after.come(trainer("a"))
        after.now += REJOIN_S + 1
        after.want("b")
        assert after.next() == ""
        assert bool(after.order.lost) is not comes


def test_a_trainer_that_waits_and_is_silent_is_passed_over() -> None:
    trainers = Trainers(order_of())
    trainers.come(trainer("a"))
    trainers.come(trainer("b"))
    trainers.now += SILENT_S + 1
    trainers.want("b")
    assert trainers.next() == "b"
    trainers.want("b", False)
    assert trainers.next() == ""
    trainers.want("a")
    assert trainers.next() == "a"


def test_whatever_happens_there_is_one_turn_at_a_time_and_none_waits_while_the_device_is_free() -> None:
    for seed in range(200):
        rng, trainers = Random(seed), Trainers(order_of())
        for name in "abcd":
            trainers.come(trainer(name, priority=rng.choice((0, 0, 1))), wants=rng.random() < 0.5)
        numbers = []
        for _ in range(60):
            name = rng.choice("abcd")
            deed = rng.randrange(5)
            trainers.now += rng.choice((0.0, 0.5, 5.0))
            if deed < 3:
                if name in trainers.claims:
                    trainers.want(name, rng.random() < 0.6)
            elif deed == 3 and name in trainers.claims:
                trainers.order.broke(trainers.now, trainers.claims.pop(name))
            elif name not in trainers.claims:
                trainers.come(trainers.trainers[name])
            before = trainers.order.turn
            began = trainers.order.review(trainers.now)
            if began is not None:
                assert before is None
                numbers.append(began.number)
            assert trainers.order.turn is not None or not trainers.order.queue(trainers.now)
            if trainers.order.lost:
                trainers.order.gone()
        assert numbers == sorted(set(numbers))
