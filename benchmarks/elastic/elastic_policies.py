"""Names the policies that the benchmark compares, and what each of them is given."""

from collections.abc import Callable
from typing import Final, NamedTuple

from benchmarks.elastic.elastic_setting import MODELS, ElasticCase, Fleet
from benchmarks.elastic.window_oracle import OraclePolicy
from ebbtide.simulator.rivals.rlboost.rlboost_policy import RLBoostPolicy
from ebbtide.simulator.rivals.verl_hybrid_policy import VerlHybridPolicy
from ebbtide.simulator.rivals.verl_policy import VerlPolicy
from ebbtide.simulator.world.elastic_policy import ElasticPolicy
from ebbtide.simulator.world.policy import Policy

#: The public code's T_init, for the window that stays.
_FIXED_S: Final = 150.0
#: Engines of two reserved devices that generate about as fast as the trainer trains.
_BALANCED: Final = {"8b": 7, "14b": 5, "32b": 6}


class ComparedPolicy(NamedTuple):
    what: str
    policy: Callable[[ElasticCase], Policy]
    fleet: Callable[[ElasticCase], Fleet]
    on_policy: bool = True


def _lent(_: ElasticCase) -> Fleet:
    return Fleet()


def _code(case: ElasticCase) -> Policy:
    return RLBoostPolicy(climbs=True, balances=False, whole_groups=True, windows=MODELS[case.model].windows)


OURS: Final = "ebbtide"
ORACLE: Final = "window oracle"
COMPARED: Final[dict[str, ComparedPolicy]] = {
    OURS: ComparedPolicy("the window of scheduling/elastic", lambda _: ElasticPolicy(), _lent),
    "rlboost paper": ComparedPolicy(
        "RLBoost's Algorithms 1 and 2, with memory", lambda _: RLBoostPolicy(whole_groups=True), _lent
    ),
    "rlboost paper, samples": ComparedPolicy(
        "the same, if gradients needed no whole groups", lambda _: RLBoostPolicy(), _lent
    ),
    "rlboost code": ComparedPolicy("RLBoost's public code: tables by hand, no moves", _code, _lent),
    "verl hybrid": ComparedPolicy("verl's rule: all devices or none, aborts", lambda _: VerlHybridPolicy(), _lent),
    "fixed window": ComparedPolicy(
        "Ebbtide with one window for all steps",
        lambda _: ElasticPolicy(plans=False),
        lambda _: Fleet(window_s=_FIXED_S),
    ),
    "co-located": ComparedPolicy(
        "veRL on the trainer's devices alone", lambda _: VerlPolicy(), lambda _: Fleet(spot=False)
    ),
    "balanced": ComparedPolicy(
        "reserved engines that keep pace with the trainer, streaming",
        lambda _: ElasticPolicy(plans=False),
        lambda case: Fleet(lends=False, spot=False, reserved=_BALANCED[case.model]),
    ),
    "asynchronous": ComparedPolicy(
        "the same one step ahead (max_staleness 1)",
        lambda _: ElasticPolicy(plans=False),
        lambda case: Fleet(lends=False, spot=False, reserved=_BALANCED[case.model], max_staleness=1),
        on_policy=False,
    ),
    ORACLE: ComparedPolicy(
        "the best window of each step, tried on the coming fleet and work", lambda _: OraclePolicy(), _lent
    ),
}
