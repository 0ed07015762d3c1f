"""The benchmark of turn routing plays what it says, and simple rules come out as they must."""

from msgspec.structs import replace

from benchmarks.rivals.policies import COMPARED
from benchmarks.turn_routing.routed_fleet import SEQUENCES, WORKERS, RoutedFleet, TrialFigures, TrialSetting, speeds
from benchmarks.turn_routing.session_work import SessionWork
from ebbtide.simulator.scenario.scenario import PolicyChoice
from ebbtide.simulator.simulate import policy_of

BASE = TrialSetting(sessions=300, warm_s=40.0, counted_s=60.0, slots=40)


def played(name: str, setting: TrialSetting = BASE) -> TrialFigures:
    return RoutedFleet(setting, 0, policy_of(PolicyChoice(name=name), COMPARED).decider).run()


def test_the_work_is_as_stated() -> None:
    work = SessionWork(seed=1, wait_s=5.0)
    sessions = [work.turns(place, 0) for place in range(4_000)]
    prompts = sum(turn.prompt for turns in sessions for turn in turns)
    responses = sum(turn.response for turns in sessions for turn in turns)
    repeated = sum(turn.prompt + turn.response for turns in sessions for turn in turns[:-1])
    assert abs(prompts / (prompts + responses) - 0.8) < 0.01
    assert abs(repeated / prompts - 0.8) < 0.01
    prefill, decode = speeds()
    assert abs(prefill / decode - 8.0) < 1e-6


def test_routing_by_prefixes_reads_little_again_and_makes_more_tokens() -> None:
    ours, spread = played("ebbtide"), played("least_loaded")
    assert ours.hits > 0.95
    assert spread.hits < 0.5
    assert ours.tokens_per_s > 1.1 * spread.tokens_per_s


def test_sessions_that_wait_for_their_environment_hold_no_slot() -> None:
    setting = replace(BASE, sessions=4 * WORKERS * SEQUENCES, wait_s=60.0)
    crowded, few = played("ebbtide", setting), played("ebbtide", replace(setting, sessions=WORKERS * SEQUENCES))
    assert crowded.tokens_per_s > 2 * few.tokens_per_s


def test_a_lost_worker_is_replaced_and_its_sessions_go_on() -> None:
    found = played("ebbtide", replace(BASE, losses_per_hour=60.0))
    assert found.losses == 1
    assert found.hits > 0.7
    assert found.turns > 0
