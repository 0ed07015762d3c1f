"""Names the policies that the benchmark compares, and what each of them is given."""

from collections.abc import Callable
from typing import Final, NamedTuple

from benchmarks.elastic.elastic_setting import MODELS, ElasticCase, Fleet
from benchmarks.elastic.window_oracle import OraclePolicy
from benchmarks.rivals.rlboost.rlboost_policy import RLBoostPolicy
from benchmarks.rivals.verl_hybrid_policy import VerlHybridPolicy
from ebbtide.simulator.world.rival_policies import VerlPolicy
from ebbtide.simulator.world.simulation import Policy
from ebbtide.simulator.world.training.elastic_window import ElasticPolicy

#: The public code's T_init, about half of it and twice it, for windows that stay.
FIXED_S: Final = (60.0, 150.0, 300.0)
#: Engines of two reserved devices that generate about as fast as the trainer trains.
_BALANCED: Final = {"8b": 7, "14b": 5, "32b": 6}
#: Steps that generation runs ahead: one, as the least that overlaps, and four.
_AHEAD, _FAR_AHEAD = 1, 4


class ComparedPolicy(NamedTuple):
    what: str
    policy: Callable[[ElasticCase], Policy]
    fleet: Callable[[ElasticCase], Fleet]
    on_policy: bool = True
    counts: bool = True  # as a baseline for tokens per money; else it pays for other devices than are there
    quick: bool = True  # a short benchmark has it: a figure needs it


def _lent(_: ElasticCase) -> Fleet:
    return Fleet()


def _fixed(window_s: float) -> ComparedPolicy:
    return ComparedPolicy(
        f"Ebbtide with a window of {window_s:g} s in all steps",
        lambda _: ElasticPolicy(plans=False),
        lambda _: Fleet(window_s=window_s),
        counts=False,
        quick=False,
    )


def _steady(what: str, max_staleness: int, *, quick: bool = False) -> ComparedPolicy:
    return ComparedPolicy(
        what,
        lambda _: ElasticPolicy(plans=False),
        lambda case: Fleet(lends=False, spot=False, reserved=_BALANCED[case.model], max_staleness=max_staleness),
        on_policy=not max_staleness,
        quick=quick,
    )


def _rlboost(case: ElasticCase, *, whole_groups: bool) -> Policy:
    assumed = case.assumed
    return RLBoostPolicy(
        whole_groups=whole_groups,
        eta=assumed.eta,
        micro_batch=assumed.micro_batch,
        initial_window_s=assumed.first_window_s,
    )


def _code(case: ElasticCase, *, units: bool = False) -> Policy:
    assumed = case.assumed
    return RLBoostPolicy(
        climbs=True,
        balances=False,
        whole_groups=True,
        windows=MODELS[case.model].windows,
        eta=assumed.eta,
        micro_batch=assumed.micro_batch,
        initial_window_s=assumed.first_window_s,
        unit_groups=units,
    )


OURS: Final = "ebbtide"
ORACLE: Final = "window oracle"
PAPER: Final = "rlboost paper"
SAMPLES: Final = "rlboost paper, samples"
CODE: Final = "rlboost code"
CODE_KEEPS: Final = "rlboost code, keeps all"
VERL: Final = "verl hybrid"
COMPARED: Final[dict[str, ComparedPolicy]] = {
    OURS: ComparedPolicy("the trainer's window (StepWindow)", lambda _: ElasticPolicy(), _lent),
    PAPER: ComparedPolicy(
        "RLBoost's Algorithms 1 and 2, with memory", lambda case: _rlboost(case, whole_groups=True), _lent
    ),
    SAMPLES: ComparedPolicy(
        "the same, if gradients needed no whole groups",
        lambda case: _rlboost(case, whole_groups=False),
        _lent,
        quick=False,
    ),
    CODE: ComparedPolicy(
        "RLBoost's public code: tables by hand, whole groups in turn, cut to their shortest response",
        lambda case: _code(case, units=True),
        _lent,
    ),
    CODE_KEEPS: ComparedPolicy(
        "the same, if it sent single rollouts to the shortest queue and a cut kept all tokens",
        _code,
        _lent,
        quick=False,
    ),
    VERL: ComparedPolicy("verl's rule: all devices or none, aborts", lambda _: VerlHybridPolicy(), _lent),
    **{f"fixed window {window_s:g} s": _fixed(window_s) for window_s in FIXED_S},
    "co-located": ComparedPolicy(
        "veRL on the trainer's devices alone", lambda _: VerlPolicy(), lambda _: Fleet(spot=False)
    ),
    "twice the nodes": ComparedPolicy(
        "veRL on twice the reserved nodes", lambda _: VerlPolicy(), lambda _: Fleet(spot=False, nodes=2)
    ),
    "balanced": _steady("reserved engines that keep pace with the trainer, streaming", 0, quick=True),
    "asynchronous": _steady("balanced, one step ahead (max_staleness 1)", _AHEAD),
    "fully asynchronous": _steady(f"balanced, {_FAR_AHEAD} steps ahead", _FAR_AHEAD),
    ORACLE: ComparedPolicy(
        "the best window of each step, tried on the coming fleet and work", lambda _: OraclePolicy(), _lent
    ),
}
