"""What the work of a trace costs at the least, whatever the policy.

`fluid_bound`: every node is always busy. `lp_bound`: groups have one trainer unit and a whole number of rollout units,
so of the two kinds of nodes one idles where the work of a group is not of that ratio. It is the linear program

    min  sum over n of z(n) (train price + n rollout price)
    s.t. sum over n of y(j, n) = work of job j,
         sum over j of y(j, n) train(j) <= z(n),  sum over j of y(j, n) rollout(j) <= n z(n),  y, z >= 0,

where z(n) are hours of groups with n rollout units. It leaves out when jobs come, their bounds, that phases are
exclusive, memory and switches; so no policy reaches it. Its dual has one free price for each n, and any prices give a
valid bound: a climb along subgradients finds good ones. Jobs of other widths pay as many times as much.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ebbtide.coordinator.rules.run_groups import Terms
from ebbtide.simulator.shared_devices import Job

Floats = npt.NDArray[np.float64]
_MOST_UNITS: Final = 8
#: Of the climb: how many, and dollars an hour of the first.
_STEPS: Final = 4_000
_FIRST_STEP: Final = 40.0


def _work(jobs: Sequence[Job], terms: Terms) -> tuple[Floats, Floats]:
    """Hours of a rollout node and of a trainer node that each job needs."""
    rollout = [sum(job.rollouts) * terms.merging.occupied * job.width / 3600.0 for job in jobs]
    train = [sum(job.trains) * job.width / 3600.0 for job in jobs]
    return np.array(rollout), np.array(train)


def fluid_bound(jobs: Sequence[Job], terms: Terms) -> float:
    rollout, train = _work(jobs, terms)
    return float(rollout.sum() * terms.rollout_price + train.sum() * terms.train_price)


def lp_bound(jobs: Sequence[Job], terms: Terms) -> float:
    rollout, train = _work(jobs, terms)
    units = np.arange(1, _MOST_UNITS + 1, dtype=float)
    cost = terms.train_price + units * terms.rollout_price
    # The dual's price of a rollout node's hour in groups of each size; what is left of the group's is the trainer's.
    nodes = np.full(_MOST_UNITS, terms.rollout_price)
    best, scale, all_jobs = fluid_bound(jobs, terms), float(rollout.sum() + train.sum()), np.arange(len(jobs))
    for step in range(1, _STEPS + 1):
        prices = (cost - units * nodes)[:, None] * train + nodes[:, None] * rollout
        cheapest = prices.argmin(axis=0)
        best = max(best, float(prices[cheapest, all_jobs].sum()))
        rise = np.bincount(cheapest, rollout - units[cheapest] * train, minlength=_MOST_UNITS)
        nodes = np.clip(nodes + _FIRST_STEP / step**0.5 * rise / scale, 0.0, cost / units)
    return best
