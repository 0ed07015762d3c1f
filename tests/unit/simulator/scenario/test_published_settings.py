"""Settings of published experiments can be stated: spot with a seeding window, co-located groups, borrowed machines."""

from pathlib import Path
from statistics import mean

import pytest

from ebbtide.simulator.scenario.machine_events import MachineChange, machine_events
from ebbtide.simulator.scenario.scenario import Scenario
from ebbtide.simulator.scenario.scenario_reader import parse_scenario
from ebbtide.simulator.scenario.workload import Workload

#: A trainer that also generates in the first minutes of a step, beside spot machines of which half are killed.
SEEDED_SPOT = """
name = "three of six are killed 100 s into a step"
steps = 4
[[fleet]]
name = "spot"
kind = "spot"
engine = "spot-engine"
workers = 6
slots = 256
price_per_hour = 5.32
[[fleet]]
name = "seeding"
kind = "trainer"
engine = "spot-engine"
workers = 4
window_s = 60
[[run]]
name = "math"
trainer = "trainer"
trainer_price_per_hour = 83.79
cap = 14_336
[[fault]]
kind = "kill"
step = 2
at_s = 100
pool = "spot"
machines = 3
"""
#: A node's machines of a recorded fleet, each kept with probability one half, in a window of two hours.
SPOT_SEGMENT = """
name = "a segment"
hours = 2
[[fleet]]
name = "spot"
kind = "spot"
engine = "spot-engine"
trace = { file = "events.csv", share = 0.5, seed = 1, start_s = 3600, span_s = 7200, most = 6 }
[[run]]
name = "math"
trainer = "trainer"
"""
#: Synchronous engines on the trainer's own machines, long responses in groups of sixteen.
COLOCATED = """
name = "co-located groups"
steps = 5
[[fleet]]
name = "instances"
kind = "trainer"
engine = "eight-gpus"
workers = 16
slots = 1024
[[run]]
name = "vision"
trainer = "trainer"
prompts = 600
group = 16
cap = 40_960
lengths = { mean = 7615, sigma = 1.1, correlation = 0.8 }
"""
#: Rounds that start more prompts and responses than they need. Rewards take a sandbox's time.
ROUNDS = """
name = "rounds"
steps = 40
[[fleet]]
name = "engines"
kind = "trainer"
engine = "one-gpu"
workers = 16
[[run]]
name = "code"
trainer = "trainer"
dataset = 4096
[run.environment]
reward_s = { median = 0.36, sigma = 1.2, most = 30 }
[policy]
name = "tail-batching"
params = { prompts = 1.25, responses = 1.25 }
"""
#: Machines that serve beside reserved ones, for an agent of many turns.
BORROWED = """
name = "borrowed"
hours = 1
[[fleet]]
name = "reserved"
engine = "one-gpu"
workers = 8
[[fleet]]
name = "serving"
kind = "borrowed"
engine = "one-gpu"
workers = 16
grants = "grants.csv"
[[run]]
name = "agent"
trainer = "trainer"
prompts = 16
lengths = { median = 150, sigma = 1.0 }
[run.environment]
turns = { median = 12, sigma = 0.6, most = 50 }
adds_tokens = { median = 600, sigma = 0.8 }
wait_s = { mean = 3 }
"""
SETTINGS = {
    "seeded spot": SEEDED_SPOT,
    "spot segment": SPOT_SEGMENT,
    "co-located": COLOCATED,
    "rounds": ROUNDS,
    "borrowed": BORROWED,
}


def made(text: str, folder: Path) -> Scenario:
    churn = (
        (second, kind, node) for second, kind in ((0, "add"), (7000, "remove"), (7100, "add")) for node in range(20)
    )
    (folder / "events.csv").write_text(
        "t_s,event,node\n" + "".join(f"{at},{kind},n{node}\n" for at, kind, node in churn)
    )
    (folder / "grants.csv").write_text("t_s,share\n0,0.6\n20,0\n26,0.9\n60,0\n")
    return parse_scenario(text, folder / "s.toml")


@pytest.mark.parametrize("text", SETTINGS.values(), ids=SETTINGS.keys())
def test_the_setting_is_a_scenario_that_can_be_drawn(text: str, tmp_path: Path) -> None:
    scenario = made(text, tmp_path)
    assert all(list(machine_events(scenario, pool, 0)) for pool in scenario.fleet)
    assert Workload(scenario, 0).turns(scenario.run[0].name, 0, 0, 0)


def test_a_segment_never_has_more_machines_than_its_cap_and_loses_them_together(tmp_path: Path) -> None:
    scenario = made(SPOT_SEGMENT, tmp_path)
    there, most = 0, 0
    for event in machine_events(scenario, scenario.fleet[0], 0):
        there += {MachineChange.COMES: 1, MachineChange.GONE: -1}.get(event.change, 0)
        most = max(most, there)
        assert event.at_s in {0.0, 3400.0, 3500.0}
    assert there == most == 6


def test_long_groups_have_their_mean_under_the_cap(tmp_path: Path) -> None:
    work = Workload(made(COLOCATED, tmp_path), 0)
    lengths = [work.turns("vision", step, prompt, 0)[0].response for step in range(5) for prompt in range(600)]
    assert mean(lengths) == pytest.approx(7615, rel=0.06)
    assert max(lengths) == 40_960
