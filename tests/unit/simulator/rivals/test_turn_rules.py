"""Where rivals that know turns place them."""

from benchmarks.rivals.turns.rose_turns_policy import RoseTurnsPolicy
from benchmarks.rivals.turns.spreading_policies import LeastLoadedPolicy, StickyPolicy
from benchmarks.rivals.turns.turn_decider import TurnDecider
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.step_pacing import VersionBounds
from tests.unit.simulator.rivals.test_rival_placement import Coordinator


class Played:
    """A rule on a fleet of three engines."""

    def __init__(self, policy: LeastLoadedPolicy | StickyPolicy | RoseTurnsPolicy, slots: int = 4) -> None:
        self.fleet = Coordinator(3, slots=slots)
        decider = policy.decider(self.fleet.as_virtual())
        assert isinstance(decider, TurnDecider)
        self.rule, self.number = decider, 0

    def turns(self, *episodes: str, now: float = 0.0) -> list[str]:
        """The engines that turns of these episodes get, in this order; the others wait."""
        for episode in episodes:
            self.number += 1
            one = QueuedRollout(
                rollout_id=f"r{self.number}", episode_id=episode, bounds=VersionBounds(1, 1), length=10,
                place=self.number, since=float(self.number),
            )  # fmt: skip
            self.fleet.run.admit(one)
        placed = self.rule.place(self.fleet.run, self.fleet.engines, now)
        self.fleet.start(placed)
        return [name.session_id.removeprefix("s-").split("-")[0] for name in placed]

    def end(self, *numbers: int) -> None:
        for number in numbers:
            self.fleet.run.finish(f"r{number}", f"ar{number}")


def test_least_loaded_spreads_turns_whatever_came_before() -> None:
    played = Played(LeastLoadedPolicy())
    assert played.turns("a", "b", "c", "d") == ["w0", "w1", "w2", "w0"]
    played.end(2)
    assert played.turns("a") == ["w1"]


def test_a_sticky_session_waits_for_its_engine_and_others_pass_it() -> None:
    played = Played(StickyPolicy(), slots=1)
    assert played.turns("a", "b") == ["w0", "w1"]
    assert played.turns("a", "c") == ["w2"]
    played.end(2)
    assert played.turns() == []
    played.end(1)
    assert played.turns() == ["w0"]


def test_rose_keeps_a_turn_at_its_worker_below_the_cap_and_spills_it_at_the_cap() -> None:
    played = Played(RoseTurnsPolicy(cap=2))
    assert played.turns("a", "b", "c", "d") == ["w0", "w1", "w2", "w0"]
    played.end(1)
    assert played.turns("a") == ["w0"]
    assert played.turns("a", "e", "f") == ["w1", "w2"]


def test_rose_sends_turns_of_a_worker_without_tokens_elsewhere() -> None:
    played = Played(RoseTurnsPolicy())
    played.turns("a", "b", "c", "d")
    for engine in played.fleet.engines[1:]:
        engine.append_stream.tokens_came(9.0)
    played.rule.move(played.fleet.run, played.fleet.engines, 10.0)
    assert played.fleet.asked_back() == {"r1": "w1-1.0", "r4": "w1-1.0"}
    assert played.turns("e", now=10.0) == ["w1"]


def test_rose_prefers_granted_serving_workers_unless_it_is_told_otherwise() -> None:
    for dedicated_first, first in ((False, "w2"), (True, "w0")):
        played = Played(RoseTurnsPolicy(dedicated_first=dedicated_first))
        lent = played.fleet.engines[2]
        lent.borrowed, lent.reclaimed = True, False
        assert played.turns("a") == [first]
        lent.reclaimed = True
        assert played.turns("b") == ["w0" if not dedicated_first else "w1"]
