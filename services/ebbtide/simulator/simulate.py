"""Simulates a scenario under the policy that it chooses, with the profiles that it names."""

from collections.abc import Mapping
from typing import Final, cast

import msgspec
from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.simulator.outcome import Outcome
from ebbtide.simulator.scenario.reading.cross_checks import unknown_policy
from ebbtide.simulator.scenario.scenario import PolicyChoice, Scenario
from ebbtide.simulator.world.ebbtide_policy import EbbtidePolicy
from ebbtide.simulator.world.elastic_policy import ElasticPolicy
from ebbtide.simulator.world.policy import Policy
from ebbtide.simulator.world.profiles import NamedProfiles
from ebbtide.simulator.world.restart_policy import RestartPolicy
from ebbtide.simulator.world.simulation import Say, Simulation
from ebbtide.simulator.world.verl_policy import VerlPolicy

#: By the name that a scenario's `[policy]` gives. Each is a record of its parameters.
POLICIES: Final[Mapping[str, type[Struct]]] = {
    "ebbtide": EbbtidePolicy,
    "elastic": ElasticPolicy,
    "restart": RestartPolicy,
    "verl": VerlPolicy,
}
#: Policies with a dispatch of their own. It refuses a second run when the simulation meets it.
SINGLE_RUN: Final = frozenset({"verl"})


def policy_of(choice: PolicyChoice, policies: Mapping[str, type[Struct]] = POLICIES) -> Policy:
    """Make the policy that a scenario names. Raises `InvalidRequest` for unknown names and wrong parameters."""
    if choice.name not in policies:
        raise InvalidRequest(unknown_policy(choice.name, policies), field="policy.name")
    try:
        return cast("Policy", msgspec.convert(choice.params, policies[choice.name]))
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{error}; correct or remove it", field="policy.params") from None


def simulate(scenario: Scenario, *, seed: int, say: Say = lambda _: None) -> Outcome:
    """Simulate a scenario with a seed. The same two give the same outcome. `say` hears of progress.

    Raises `InvalidRequest` for profiles that cannot be read, and for work that no worker can do.
    """
    return Simulation(scenario, seed, policy_of(scenario.policy), NamedProfiles(scenario.folder)).run(say)
