"""Names all policies of scenarios. Each is a record of its parameters."""

from typing import Final, cast

import msgspec
from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.simulator.rivals.ablated_policy import AblatedPolicy
from ebbtide.simulator.rivals.clairvoyant_policy import ClairvoyantPolicy
from ebbtide.simulator.rivals.restart_policy import RestartPolicy
from ebbtide.simulator.rivals.rlboost.rlboost_policy import RLBoostPolicy
from ebbtide.simulator.rivals.rollpacker_policy import RollPackerPolicy
from ebbtide.simulator.rivals.tail.long_tail_policy import LongTailPolicy
from ebbtide.simulator.rivals.tail.seer_policy import SeerPolicy
from ebbtide.simulator.rivals.tail.speculating_verl import SpeculatingVerlPolicy
from ebbtide.simulator.rivals.turns.rose_turns_policy import RoseTurnsPolicy
from ebbtide.simulator.rivals.turns.spreading_policies import LeastLoadedPolicy, StickyPolicy
from ebbtide.simulator.rivals.verl_hybrid_policy import VerlHybridPolicy
from ebbtide.simulator.rivals.verl_policy import VerlPolicy
from ebbtide.simulator.scenario.scenario import PolicyChoice
from ebbtide.simulator.world.ebbtide_policy import EbbtidePolicy
from ebbtide.simulator.world.elastic_policy import ElasticPolicy
from ebbtide.simulator.world.policy import Policy

#: By the name that a scenario's `[policy]` gives.
POLICIES: Final[dict[str, type[Struct]]] = {
    "ablated": AblatedPolicy,
    "clairvoyant": ClairvoyantPolicy,
    "ebbtide": EbbtidePolicy,
    "elastic": ElasticPolicy,
    "least_loaded": LeastLoadedPolicy,
    "long_tail": LongTailPolicy,
    "restart": RestartPolicy,
    "rlboost": RLBoostPolicy,
    "rollpacker": RollPackerPolicy,
    "rose_turns": RoseTurnsPolicy,
    "seer": SeerPolicy,
    "sticky": StickyPolicy,
    "verl": VerlPolicy,
    "verl_drafts": SpeculatingVerlPolicy,
    "verl_hybrid": VerlHybridPolicy,
}


def policy_of(choice: PolicyChoice) -> Policy:
    """Make the policy that a scenario names. Raises `InvalidRequest` for unknown names and wrong parameters."""
    if choice.name not in POLICIES:
        raise InvalidRequest(f"there is no {choice.name!r}; known are {', '.join(POLICIES)}", field="policy.name")
    try:
        return cast("Policy", msgspec.convert(choice.params, POLICIES[choice.name]))
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{error}; correct or remove it", field="policy.params") from None
