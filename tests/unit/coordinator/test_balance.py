"""Laws of moves, over many random fleets, seeded."""

import random
import time
from math import inf
from typing import Any, cast

import msgspec
import pytest

from ebbtide.coordinator.dispatch.moves import EngineLoad, MoveSearch, RolloutMove, RunningRollout, rebalance
from ebbtide.coordinator.dispatch.speeds import KindCurve, SeenEngine
from ebbtide.coordinator.forecasts.length_learner import LengthCurve, LengthLearner
from ebbtide.coordinator.forecasts.throughput import WorkerThroughput
from ebbtide.coordinator.rules.move_costs import COSTS, MoveCosts
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.coordinator.rules.worker_view import WorkerView
from ebbtide.step_pacing import VersionBounds
from tests.unit.coordinator.forecasts.drawn_lengths import known_lengths

NOW = 1_000.0


def speed(rate: float = 30.0, plateau: int = 32) -> WorkerThroughput:
    known = WorkerThroughput()
    for running in range(1, 65):
        for _ in range(3):
            known.observe(running, 2_000, round(rate * min(running, plateau) * 10), 10.0)
    return known


EVEN = speed()


def lengths(mean: int = 3_000) -> LengthCurve:
    return known_lengths((mean // 4, mean // 2, mean, mean * 2, mean * 8) * 40)


def generating(
    name: str, *, made: int = 500, since: float = 0.0, started: bool = True, **limits: Any
) -> RunningRollout:
    stays = limits.pop("stays", False)
    waiting = QueuedRollout(
        rollout_id=name, episode_id=name, bounds=VersionBounds(*limits.pop("bounds", (0, 0))), length=500 + made,
        place=0, **limits,
    )  # fmt: skip
    return RunningRollout(
        attempt_id=name,
        rollout=waiting,
        length=500 + made,
        made=made,
        budget=32_768 - made,
        since=since,
        started=started,
        stays=stays,
    )


def engine(
    name: str,
    rollouts: list[RunningRollout],
    *,
    learnt: WorkerThroughput = EVEN,
    slots: int = 64,
    version: int = 1,
    promised: int = 0,
    held: bool = False,
    **lent: Any,
) -> EngineLoad:
    worker = WorkerView(
        session_id=name, worker_id=name, slots=slots, running=len(rollouts) + promised,
        installed=version, target=version, max_model_len=40_000, pending=sum(not one.started for one in rollouts),
        held=held, **lent,
    )  # fmt: skip
    return EngineLoad(worker=worker, speed=learnt, context=2_000, rollouts=lambda: rollouts)


def running(name: str, number: int, **more: Any) -> list[RunningRollout]:
    return [generating(f"{name}{index}", **more) for index in range(number)]


def moves(engines: list[EngineLoad], **terms: Any) -> list[RolloutMove]:
    """As the coordinator asks: all engines are of one kind, and their speeds what was learnt of that."""
    seen = [SeenEngine(cast("WorkerThroughput", one.speed), one.context) for one in engines]
    kind = KindCurve.learnt(seen)
    if kind is not None:
        engines = [msgspec.structs.replace(one, speed=kind.of(of)) for one, of in zip(engines, seen, strict=True)]
    return rebalance(engines, terms.pop("known", lengths()), now=NOW, **terms)


@pytest.mark.parametrize("seed", range(100))
def test_moves_keep_their_laws(seed: Any) -> None:
    draw = random.Random(seed)
    fleet = []
    for index in range(draw.randint(2, 8)):
        rollouts = [
            generating(f"w{index}.{n}", made=draw.randint(0, 20_000), since=NOW - draw.choice([0.1, 5.0, 100.0]),
                       started=draw.random() < 0.9, bounds=draw.choice([(0, 0), (1, 1), (2, 2)]),
                       avoid=frozenset(draw.choice([(), ("w0",)])))
            for n in range(draw.choice([0, 10, 40, 64]))
        ]  # fmt: skip
        fleet.append(engine(f"w{index}", rollouts, learnt=speed(draw.choice([10.0, 30.0])), version=draw.randint(1, 2)))
    by_name = {one.worker.session_id: one for one in fleet}
    everyone = {one.attempt_id: one for each in fleet for one in each.rollouts()}
    made = moves(fleet)
    load = {name: one.worker.running for name, one in by_name.items()}
    assert len(made) <= COSTS.at_once
    assert len({move.attempt_id for move in made}) == len(made)
    for move in made:
        one, target = everyone[move.attempt_id], by_name[move.target].worker
        load[move.source] -= 1
        load[move.target] += 1
        assert one in list(by_name[move.source].rollouts())
        assert move.source != move.target
        assert move.gain_s > 0.0
        assert one.rollout.bounds in {(0, 0), (target.installed, target.installed)}
        assert move.target not in one.rollout.avoid
        assert not one.started or NOW - one.since >= COSTS.least_stay_s
    assert all(load[name] <= max(one.worker.slots, one.worker.running) for name, one in by_name.items())
    assert moves(fleet) == made  # a decision can be repeated


@pytest.mark.parametrize("counts", [[20, 20], [32, 0], [32, 5, 30], [64, 64], [40, 44]])
def test_nothing_moves_where_nothing_would_run_faster(counts: Any) -> None:
    """Below the plateau no rollout is slowed by others, and shares that are nearly even are even."""
    assert moves([engine(f"w{n}", running(f"w{n}.", count)) for n, count in enumerate(counts)]) == []


def test_the_surplus_beyond_the_plateau_moves_and_no_more() -> None:
    """RLBoost's second rule, without waiting for an engine to fall idle."""
    made = moves([engine("full", running("f", 64)), engine("idle", [])], costs=MoveCosts(at_once=100))
    assert {(move.source, move.target) for move in made} == {("full", "idle")}
    assert 8 <= len(made) <= 32  # beyond, the crowd dissolves as soon as the first have ended


def test_those_with_most_still_to_come_move_first() -> None:
    rollouts = [generating(f"r{made}", made=made) for made in range(0, 6_400, 100)]
    known = known_lengths((500, 32_000) * 100)
    chosen = [int(move.attempt_id[1:]) for move in moves([engine("a", rollouts), engine("b", [])], known=known)]
    assert min(chosen[:10]) > 500


def test_a_move_that_gains_less_than_its_prefill_is_not_made() -> None:
    fleet = [engine("a", running("a", 64, made=20_000)), engine("b", [])]
    short = lengths(mean=8)
    assert moves(fleet, costs=MoveCosts(prefill_tokens_per_s=10_000.0)) != []
    assert moves(fleet, costs=MoveCosts(prefill_tokens_per_s=10.0)) == []
    assert moves([engine("a", running("a", 64, made=0)), engine("b", [])], known=short) == []


def test_prefills_that_pile_up_at_one_worker_end_the_moves() -> None:
    fleet = [engine("a", running("a", 64, made=2_000)), engine("b", [])]
    few = moves(fleet, costs=MoveCosts(prefill_tokens_per_s=200.0, at_once=100))
    assert 0 < len(few) < len(moves(fleet, costs=MoveCosts(at_once=100)))


def test_a_rollout_that_has_just_come_is_left_in_peace() -> None:
    assert moves([engine("a", running("a", 64, since=NOW - 5.0)), engine("b", [])]) == []


def test_the_faster_worker_gets_more() -> None:
    made = moves([engine("slow", running("s", 20), learnt=speed(10.0)), engine("fast", running("f", 20))])
    assert made
    assert {(move.source, move.target) for move in made} == {("slow", "fast")}


def test_a_worker_of_which_nothing_is_known_is_taken_for_a_typical_one() -> None:
    made = moves([engine("a", running("a", 64)), engine("new", [], learnt=WorkerThroughput())])
    assert {move.target for move in made} == {"new"}


def test_what_is_on_its_way_counts() -> None:
    assert moves([engine("a", running("a", 36)), engine("b", [], promised=32)]) == []


def test_work_that_waits_in_an_engine_goes_to_one_that_has_nothing_waiting() -> None:
    """RLBoost's first rule: from the longest queue, and until the receiver would queue as long."""
    longer = running("a", 8) + running("q", 5, started=False)
    fleet = [engine("a", longer, slots=8), engine("b", running("b", 6), slots=8), engine("c", running("c", 8), slots=8)]
    made = moves(fleet)
    assert [(move.source, move.target) for move in made] == [("a", "b")] * 2
    assert [move.attempt_id for move in made] == ["q4", "q3"]
    empty = engine("b", [], slots=64)
    assert [move.attempt_id for move in moves([fleet[0], empty])] == ["q4", "q3"]  # and q2 would be third in both


@pytest.mark.parametrize("made", [0, 500, 30_000])
def test_a_lone_rollout_that_is_being_prefilled_is_left_in_peace(made: Any) -> None:
    for waited_s in (1.1, 10.0, 60.0):
        queue = running("q", 1, started=False, made=made, since=NOW - waited_s)
        assert moves([engine("a", running("a", 9) + queue), engine("b", [])]) == []
        assert moves([engine("a", queue), engine("b", [])]) == []


def test_what_has_hardly_had_time_to_start_is_not_stuck() -> None:
    fleet = [engine("a", running("q", 5, started=False, since=NOW - 0.5)), engine("b", [])]
    assert moves(fleet) == []
    for waited_s, most in ((14.0, 0), (14.9, 1), (20.0, 1)):  # 1 s, and 6.9 s for each prefill
        queue = running("q", 2, started=False, made=34_000, since=NOW - waited_s)
        assert len(moves([engine("a", queue), engine("b", [])])) == most


def test_what_waits_stays_with_its_prefix_for_as_long_as_reading_that_elsewhere_would_cost() -> None:
    for waited_s, most in ((6.0, 0), (9.0, 1)):  # 1 s of bound, and 1 s of reading at a worker with 6 others
        queue = running("q", 2, started=False, made=4_500, since=NOW - waited_s)
        queue = [msgspec.structs.replace(one, cached=5_000) for one in queue]
        assert len(moves([engine("a", queue), engine("b", running("b", 6, since=NOW))])) == most


def test_an_engine_that_makes_no_token_loses_also_what_it_reads_first() -> None:
    queue = running("q", 1, started=False, made=4_500, since=NOW - 3.5)  # 2 s of bound, and 0.2 s of reading
    queue = [msgspec.structs.replace(one, cached=4_000) for one in queue]
    for quiet_s, most in ((0.0, 0), (1.9, 0), (2.0, 1)):
        stalled = msgspec.structs.replace(engine("a", queue), quiet_s=quiet_s)
        assert len(moves([stalled, engine("b", [])])) == most
        assert moves([engine("c", running("c", 3, started=False)), stalled]) == []
    early = [msgspec.structs.replace(one, since=NOW - 2.1) for one in queue]
    assert moves([msgspec.structs.replace(engine("a", early), quiet_s=9.0), engine("b", [])]) == []


def test_what_is_to_stay_counts_and_stays() -> None:
    queue = [*running("q", 3, started=False), *running("s", 2, started=False, stays=True)]
    made = moves([engine("a", queue), engine("b", [])])
    assert [move.attempt_id for move in made] == ["q2", "q1"]
    assert moves([engine("a", running("a", 64, stays=True)), engine("b", [])]) == []


def test_nothing_moves_to_a_worker_that_is_held() -> None:
    crowd = engine("a", running("a", 60) + running("q", 4, started=False))
    assert moves([crowd, engine("b", [], held=True)]) == []
    assert {move.target for move in moves([crowd, engine("b", [], held=True), engine("c", [])])} == {"c"}


def test_rules_can_be_left_out() -> None:
    fleet = [engine("a", running("a", 64)), engine("b", [])]
    assert moves(fleet, costs=MoveCosts(advantage=inf)) == []
    assert moves(fleet[:1]) == []


def test_a_hundred_full_workers_cost_little_while_there_is_nothing_to_do() -> None:
    asked: list[int] = []

    def ask() -> list[RunningRollout]:
        asked.append(1)
        return []

    worker = WorkerView(session_id="w", slots=64, running=64, installed=1, target=1, max_model_len=40_000)
    fleet = [EngineLoad(worker=worker, speed=EVEN, context=2_000, rollouts=ask) for _ in range(100)]
    began = time.process_time()
    for _ in range(10):
        assert rebalance(fleet, LengthLearner().curve, now=NOW) == []
    assert (time.process_time() - began) / 10 < 0.005
    assert not asked


@pytest.mark.parametrize("stalled", [1, 2, 3])
def test_a_speed_that_nobody_would_believe_moves_nothing(stalled: Any) -> None:
    """As after a stall that was taken for work: a token in ten seconds of all that ran."""
    slow = WorkerThroughput()
    for running in (4, 8, 16):
        slow.observe(running, 2_000, 1, 10.0)
    engines = [engine(f"s{n}", [generating(f"s{n}.{i}") for i in range(8)], learnt=slow) for n in range(stalled)]
    engines += [engine("idle", []), engine("known", [generating(f"k{i}") for i in range(8)])]
    assert moves(engines) == []


def borrowed(name: str, rollouts: list[RunningRollout], *, share: float = 0.9, spell_s: float = 10.0) -> EngineLoad:
    return engine(name, rollouts, borrowed=True, share=share, spell_s=spell_s)


def test_long_work_leaves_a_borrowed_worker_with_a_small_share_for_a_steady_one() -> None:
    soon = msgspec.structs.replace(generating("short", made=0), budget=20)
    made = moves([borrowed("lent", [generating("long", made=16_000), soon], share=0.3), engine("steady", [])])
    assert [(move.attempt_id, move.target) for move in made] == [("long", "steady")]


def test_nothing_goes_to_a_borrowed_worker_that_is_faster_only_while_it_lasts() -> None:
    full = running("f", 50, made=8_000)
    assert moves([engine("full", full), engine("idle", [])])
    assert moves([engine("full", full), borrowed("lent", [], share=0.4)]) == []


def test_what_a_reclaim_would_cost_keeps_work_from_a_shaky_worker() -> None:
    surplus = running("f", 50, made=20_000)
    to_steady = moves([engine("full", surplus), borrowed("lent", [], share=1.0, spell_s=1e9)])
    dear = MoveCosts(prefill_tokens_per_s=500.0)
    assert len(to_steady) > len(
        moves([engine("full", surplus), borrowed("lent", [], share=1.0, spell_s=1.0)], costs=dear)
    )


def test_nothing_goes_to_a_worker_whose_host_has_itself_back() -> None:
    away = engine("lent", [], borrowed=True, spell_s=1e9, shut=True)
    assert moves([engine("full", running("f", 64)), away]) == []


@pytest.mark.parametrize("waits", [False, True])
def test_a_round_looks_at_few_engines_of_a_large_fleet_and_later_rounds_at_the_others(waits: bool) -> None:
    looked: list[str] = []

    def busy(name: str) -> EngineLoad:
        def rollouts() -> list[RunningRollout]:
            looked.append(name)
            return [generating(f"{name}-{at}", since=NOW - 0.5, started=not waits) for at in range(3)]

        worker = WorkerView(
            session_id=name, slots=64, running=3, pending=3 if waits else 0, installed=1, target=1, max_model_len=32_768
        )  # fmt: skip
        return EngineLoad(worker=worker, speed=speed(5.0), context=1_000.0, rollouts=rollouts)

    fleet = [busy(f"w{number:03}") for number in range(300)]
    free = WorkerView(session_id="free", slots=64, running=0, installed=1, target=1, max_model_len=32_768)
    fleet.append(EngineLoad(worker=free, speed=EVEN, context=1_000.0, rollouts=list))
    search = MoveSearch()
    rounds: list[int] = []
    while len(set(looked)) < 300:
        before = len(looked)
        assert rebalance(fleet, lengths(), now=NOW, search=search) == []
        rounds.append(len(looked) - before)
        assert len(rounds) < 30
    assert max(rounds) <= (16 if waits else 32)  # where they run, some stand for all in the end of the step


def test_a_straggler_of_a_large_fleet_is_relieved_wherever_it_stands() -> None:
    """Though some engines stand for the others in the expected end of the step."""
    for at in (0, 33, 150, 299):
        fleet = [engine(f"w{number:03}", running(f"{number}.", 20)) for number in range(300)]
        fleet[at] = engine(f"w{at:03}", running(f"{at}.", 62))
        fleet.append(engine("free", []))
        made = moves(fleet)
        assert made
        assert {(move.source, move.target) for move in made} == {(f"w{at:03}", "free")}


def test_a_large_fleet_that_moves_is_decided_in_time() -> None:
    fleet = [engine(f"w{number:03}", running(f"{number}.", 62 if number % 2 else 20)) for number in range(1_000)]
    seen = [SeenEngine(EVEN, 2_000.0)]
    kind = KindCurve.learnt(seen)
    assert kind is not None
    fleet = [msgspec.structs.replace(one, speed=kind.of(seen[0])) for one in fleet]
    known, took = lengths(), []
    for _ in range(5):
        began = time.process_time()
        assert rebalance(fleet, known, now=NOW)
        took.append(time.process_time() - began)
    assert min(took) < 0.08


@pytest.mark.parametrize("odd", [{"version": 2}, {"slots": 64, "prefill": 10.0}, {"shut": True}])
def test_an_idle_engine_that_cannot_help_hides_no_other(odd: dict[str, Any]) -> None:
    """As one that is kept at another version, or reads slowly."""
    bound = [generating(f"a{number}", bounds=(1, 1)) for number in range(64)]
    others = [engine("c", [], prefill=5_000.0), engine("z", [], **({"prefill": 5_000.0} | odd))]
    made = moves([engine("a", bound, prefill=5_000.0), *others])
    assert len(made) > 8
    assert {move.target for move in made} == {"c"}


def test_a_rollout_that_became_too_long_for_an_engine_does_not_move_there() -> None:
    grown = [msgspec.structs.replace(one, length=45_000) for one in running("a", 64, made=20_000)]
    assert moves([engine("a", grown), engine("b", [])]) == []


def test_a_rollout_stays_longer_with_each_attempt() -> None:
    for attempts, stays_s in ((1, 10.0), (2, 40.0), (3, 160.0)):
        for waited_s, most in ((stays_s - 1.0, 0), (stays_s + 1.0, 1)):
            crowd = [msgspec.structs.replace(one, attempts=attempts) for one in running("a", 64, since=NOW - waited_s)]
            assert bool(moves([engine("a", crowd), engine("b", [])])) == bool(most)
