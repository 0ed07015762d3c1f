"""The policies that a virtual pair can be played under, by their names."""

import pytest

from benchmarks.pair.rivals.rose_policy import RoseAdmission, RoseMemory, RoseSetting, RoseTables
from benchmarks.pair.virtual.compared_policies import serving_policy
from benchmarks.pair.virtual.pair_costs import PairCosts
from ebbtide.errors import InvalidRequest
from ebbtide.serving_guard.governor.budget_decider import LatencyTargets, StepLimits
from ebbtide.serving_guard.governor.memory import CUT, NORMAL
from ebbtide.types.grants import GRANTS_VERSION, Hello

COSTS = PairCosts()
TABLES = RoseTables(prefill_s=0.01, prefill_token_s=0.001, decode_s=0.02, decode_more_s=0.002)
TARGETS, LIMITS = LatencyTargets(ttft_s=1.0, tpot_s=0.1), StepLimits(tokens=32, sequences=8)
MIB = 1 << 20


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("theirs", "theirs"),
        ("alone:1", "alone:1"),
        ("rose", "STEP_S"),
        ("rose:600,1,0.2", "STEP_S"),
        ("rose:0,1,0.2,1", "above 0"),
        ("rose:600,1,1,1", "from 0 to 1"),
        ("rose:nan,1,0.2,1", "above 0"),
        ("ours:much", "from 0 to 1"),
        ("ours:2", "from 0 to 1"),
    ],
)
def test_a_policy_that_is_none_is_refused_by_its_name(name: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        serving_policy(name, COSTS)


def test_roses_offline_tables_are_the_pairs_costs() -> None:
    made = serving_policy("rose:600,1,0.2,1", COSTS).decider(TARGETS, LIMITS)
    assert isinstance(made, RoseAdmission)
    assert made._tables.prefill(400) == pytest.approx(COSTS.prefill(400))
    assert made._tables.decode(5) == pytest.approx(COSTS.decode(5))


def test_rose_admits_rollouts_until_the_least_slack_is_used_up() -> None:
    rose = RoseAdmission(TARGETS, LIMITS, RoseSetting(held=0.5), TABLES)
    assert rose.decide(0.0).budget.tokens == 32
    rose.arrived(1.0, "a", 100)
    until = 1.0 + 0.5 * TARGETS.ttft_s - TABLES.prefill(100)
    assert rose.decide(until - 0.05).budget.until == pytest.approx(until)
    assert rose.decide(until).budget.tokens == 0
    rose.produced(1.5, "a", 1)
    assert rose.decide(1.5).slack_s == pytest.approx(0.5 * TARGETS.tpot_s - TABLES.decode(1))
    rose.ended(1.6, "a", ok=True)
    assert rose.decide(1.6).state == "idle"


def test_rose_halves_the_rollouts_memory_once_and_gives_it_back_at_the_next_rl_step() -> None:
    setting = RoseSetting(step_s=100.0, watermark=0.5, headroom=0.2)
    memory = RoseMemory(setting, limit_mib=100, serving_kv_mib=50, bytes_per_token=MIB)
    memory.joined("w", Hello(protocol_version=GRANTS_VERSION, worker_id="w", slots=8, kv_bytes=200 * MIB))
    seen = []
    for now, tokens in ((1.0, 5), (2.0, 11), (3.0, 40), (4.0, 0), (99.0, 0), (101.0, 0)):
        memory.tokens_inside(now, tokens)
        allowed = memory.allowed(now, "w", idle_s=0.0)
        seen.append((allowed.kv_bytes // MIB, allowed.phase))
    assert seen == [(80, NORMAL), (40, CUT), (40, CUT), (40, CUT), (40, CUT), (80, NORMAL)]
