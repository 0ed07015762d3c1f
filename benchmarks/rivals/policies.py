"""Names all policies that simulations compare: the simulator's own, and those of this folder."""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from benchmarks.rivals.ablated_policy import AblatedPolicy
from benchmarks.rivals.clairvoyant_policy import ClairvoyantPolicy
from benchmarks.rivals.rlboost.rlboost_policy import RLBoostPolicy
from benchmarks.rivals.rollpacker_policy import RollPackerPolicy
from benchmarks.rivals.tail.seer_policy import SeerPolicy
from benchmarks.rivals.tail.speculating_verl import SpeculatingVerlPolicy
from benchmarks.rivals.turns.rose_turns_policy import RoseTurnsPolicy
from benchmarks.rivals.turns.spreading_policies import LeastLoadedPolicy, StickyPolicy
from benchmarks.rivals.verl_hybrid_policy import VerlHybridPolicy
from ebbtide.simulator.simulate import POLICIES

#: For `policy_of`, by the name of a `PolicyChoice`.
COMPARED: Final[Mapping[str, type[Struct]]] = {
    **POLICIES,
    "ablated": AblatedPolicy,
    "clairvoyant": ClairvoyantPolicy,
    "least_loaded": LeastLoadedPolicy,
    "rlboost": RLBoostPolicy,
    "rollpacker": RollPackerPolicy,
    "rose_turns": RoseTurnsPolicy,
    "seer": SeerPolicy,
    "sticky": StickyPolicy,
    "verl_drafts": SpeculatingVerlPolicy,
    "verl_hybrid": VerlHybridPolicy,
}
