"""Scenario files for tests: a short one, and one that states almost every key."""

from pathlib import Path
from typing import Final

from ebbtide.checked_files import FileRefused, Problem
from ebbtide.simulator.scenario.scenario import Scenario
from ebbtide.simulator.scenario.scenario_checks import KnownNames
from ebbtide.simulator.scenario.scenario_reader import parse_scenario

_ANY: Final = KnownNames()

SHORT: Final = """\
name = "six machines"
hours = 2.0

[[fleet]]
name = "spot"
engine = "small"
workers = 6

[[run]]
name = "math"
trainer = "large"
"""

FULL: Final = """\
name = "everything"  # a comment
hours = 3
steps = 50
relay_gbps = 100.0

[[fleet]]
name = "spot"
kind = "spot"
engine = "small"
trace = { file = "counts.csv", share = 0.5, seed = 1, start_s = 10, span_s = 3000, most = 4, repeats = true }
prices = "prices.csv"
from_s = 60.0
until_s = 9_000
slots = 256
boot_s = 67.0
link_gbps = 50.0
speed_spread = 0.1
flush_s = 0.25
flush_tokens = 32
losses_per_hour = 0.5
replaced_s = 300
notice_s = 30.0
unannounced = 0.1
stalls_per_hour = 0.2
stall_s = 20

[[fleet]]
name = "nodes"
kind = "spot"
engine = "small"
trace = { file = "events.csv", time_scale = 0.5 }

[[fleet]]
name = "borrowed"
kind = "borrowed"
engine = "small"
workers = 4
grants = { file = "grants.csv", alike = true }

[[fleet]]
name = "own"
kind = "trainer"
engine = "small"
workers = 4
run = "math"
window_s = 60

[[run]]
name = "math"
steps = 20
prompts = 128
group = 8
max_staleness = 1
dataset = 1000
prompt_tokens = "quantiles.csv"
cap = 16_384
context = 40_960
lengths = { file = "cdf.csv", mean = 2000, correlation = 0.6, repeats = 0.7 }
trainer = "large"
trainer_price_per_hour = 83.79
publish_gbps = 200.0
checkpoint_every = 10
share = { weight = 2.0, floor = 0.1, ceiling = 0.9, priority = 1 }
[run.environment]
turns = { low = 1, high = 5 }
adds_tokens = { median = 200, sigma = 0.5, tail_sigma = 0.3, tail_from = 1.0 }
wait_s = { mean = 3.0, most = 60 }
reward_s = 0.5

[[run]]
name = "code"
start_s = 600
lengths = 900
trainer = "large"

[[fault]]
kind = "kill"
at_s = 100
step = 3
run = "math"
pool = "borrowed"
machines = 2
back_s = 60

[[fault]]
kind = "trainer"
at_s = 200.0
run = "code"
for_s = 30

[policy]
name = "ebbtide"
[policy.params]
eta = 1.25
"""

TABLES: Final = {
    "counts.csv": "t_s,count\n0,3\n600,5\n600,2\n1200,0\n2400,6\n",
    "events.csv": "t_s,event,node\n0,add,a\n0,add,b\n60,remove,a\n60,add,c\n7200,remove,b\n",
    "prices.csv": "t_s,dollars_per_hour\n0,5.0\n3600,6.5\n",
    "grants.csv": "t_s,share\n0,0.5\n2,0\n15.5,1\n30,0\n",
    "quantiles.csv": "quantile,tokens\n0.1,100\n0.5,300\n1.0,900\n",
    "cdf.csv": "tokens,cdf\n10,0.1\n500,0.5\n4000,0.95\n",
}


def write_tables(folder: Path) -> Path:
    """Write the tables that `FULL` names, and return the path of a scenario beside them."""
    for name, text in TABLES.items():
        (folder / name).write_text(text)
    return folder / "scenario.toml"


def problems(text: str, path: Path, known: KnownNames = _ANY) -> list[Problem]:
    """All that is wrong with a text; none if it is a scenario."""
    try:
        parse_scenario(text, path, known)
    except FileRefused as refused:
        return list(refused.problems)
    return []


def scenario(text: str = SHORT, folder: Path = Path()) -> Scenario:
    return parse_scenario(text, folder / "scenario.toml")
