"""Simulates a scenario under the policy that it chooses, with the profiles that it names."""

from ebbtide.simulator.outcome import Outcome
from ebbtide.simulator.rivals.policies import policy_of
from ebbtide.simulator.scenario.scenario import Scenario
from ebbtide.simulator.world.profiles import NamedProfiles
from ebbtide.simulator.world.simulation import Say, Simulation


def simulate(scenario: Scenario, *, seed: int, say: Say = lambda _: None) -> Outcome:
    """Simulate a scenario with a seed. The same two give the same outcome. `say` hears of progress.

    Raises `InvalidRequest` for profiles that cannot be read, and for work that no worker can do.
    """
    return Simulation(scenario, seed, policy_of(scenario.policy), NamedProfiles(scenario.folder)).run(say)
