"""Accounts the tokens that each run was due against those that it got.

Invariant: each `tick` divides the tokens made for runs with work by what each was due; a run that got less is owed the
difference. So debts add up to zero, except where bounds cut them off. A run that does not wait for workers could not
have used more: it is owed almost nothing, and the others get what it left. Runs without work lose credit and debt
within seconds: idle runs accrue no credit, and using spare capacity incurs no debt. Lost with the process: no run is
owed anything then.
"""

from collections.abc import Collection, Mapping
from math import exp
from typing import Final

from msgspec import Struct

from ebbtide.scheduling.fair_share.shares import EPSILON

#: Stands for the capacity that ceilings keep from every run.
REST: Final = ""
#: Time constants: of tokens per worker, of the debts of runs without work, and of the reported shares.
_RATE_S: Final = 10.0
_FORGOTTEN_S: Final = 5.0
_LATELY_S: Final = 30.0
#: Largest credit or debt, in turns of the workers that the run is due.
_TURNS: Final = 8.0
#: Largest credit of a run that does not wait for workers, in turns of one worker.
_SPARED: Final = 0.5
#: Assumed time to install another run's weights, until one is measured.
CHANGE_S: Final = 1.0
#: A run's lower demand is believed after so many times the cost of a change (the rent-or-buy rule: by then waiting has
#: cost as much as changing and back), within these bounds.
_PATIENCE: Final = 2.0
_PATIENCE_S: Final = (0.25, 30.0)


class RunDue(Struct, frozen=True):
    share: float  # of the fleet
    waits: bool  # it has queued rollouts, and is not held back from starting them


class ShareAccounts:
    def __init__(self, now: float) -> None:
        self._at = now
        self._owed: dict[str, float] = {}  # run -> tokens
        self._tokens = self._worked_s = 0.0  # lately, of all workers: what they made in how long
        self._lately: dict[str, float] = {}

    @property
    def rate(self) -> float:
        """Tokens/s of a working worker; 0.0 while nothing is known."""
        return self._tokens / self._worked_s if self._worked_s > EPSILON else 0.0

    def owed_s(self, run_id: str) -> float:
        """Worker-seconds that the run is owed; below 0: that it owes."""
        return self._owed.get(run_id, 0.0) / self.rate if self.rate else 0.0

    def lately(self, run_id: str) -> float:
        """The run's share of the tokens made within half a minute or so."""
        total = sum(self._lately.values())
        return self._lately.get(run_id, 0.0) / total if total > EPSILON else 0.0

    def tick(
        self,
        made: Mapping[str, int],
        due: Mapping[str, RunDue],
        *,
        workers: int,
        resting: int,
        turn_s: float,
        now: float,
    ) -> None:
        """Account for the time since the last call. `made`: tokens by run; `due`: of the runs with work; of `workers`
        that worked or rested, so many were `resting`.
        """
        span_s, self._at = max(0.0, now - self._at), now
        self._learn(made, span_s, workers - resting)
        got = {run_id: float(made.get(run_id, 0)) for run_id in due}
        shares = {run_id: one.share for run_id, one in due.items()}
        if (rest := 1.0 - sum(shares.values())) > EPSILON and due:
            shares[REST], got[REST] = rest, resting * span_s * self.rate
        least = _SPARED * turn_s * self.rate
        spared = {run_id for run_id, one in due.items() if not one.waits}
        for run_id, paid in self._paid(shares, got, spared, least).items():
            most = _TURNS * turn_s * self.rate * max(1.0, shares[run_id] * workers)
            self._owed[run_id] = max(-most, min(most, self._owed.get(run_id, 0.0) + paid - got[run_id]))
        self._forget(shares, span_s)

    def _paid(
        self, shares: Mapping[str, float], got: Mapping[str, float], spared: Collection[str], least: float
    ) -> dict[str, float]:
        """The tokens due to each run. A `spared` run that is owed `least` is due what it got."""
        even: set[str] = set()
        while True:
            rest = {run_id: share for run_id, share in shares.items() if run_id not in even}
            pool, total = sum(got[run_id] for run_id in rest), sum(rest.values())
            part = pool / total if total > EPSILON else 0.0
            paid = {run_id: got[run_id] if run_id in even else part * share for run_id, share in shares.items()}
            more = {
                run_id
                for run_id in rest
                if run_id in spared and self._owed.get(run_id, 0.0) + paid[run_id] - got[run_id] > least
            }
            if not more:
                return paid
            even |= more

    def _learn(self, made: Mapping[str, int], span_s: float, working: int) -> None:
        fade, fade_lately = exp(-span_s / _RATE_S), exp(-span_s / _LATELY_S)
        self._tokens = fade * self._tokens + sum(made.values())
        self._worked_s = fade * self._worked_s + working * span_s
        for run_id in self._lately.keys() | made.keys():
            self._lately[run_id] = fade_lately * self._lately.get(run_id, 0.0) + made.get(run_id, 0)
        self._lately = {run_id: tokens for run_id, tokens in self._lately.items() if tokens > 0.5}

    def _forget(self, working: Collection[str], span_s: float) -> None:
        fade = exp(-span_s / _FORGOTTEN_S)
        for run_id in self._owed.keys() - working:
            self._owed[run_id] *= fade
            if abs(self._owed[run_id]) < 1.0:
                del self._owed[run_id]


class WorkerDemand:
    """Smooths how many workers runs want: a run between two steps still wants some."""

    def __init__(self) -> None:
        self._believed: dict[str, float] = {}
        self._fell: dict[str, tuple[float, float]] = {}  # run -> since when it wants less, and the most since then

    def believed(self, wanted: Mapping[str, float], *, change_s: float, now: float) -> dict[str, float]:
        """The believed demands, from the present ones; without runs that have wanted nothing for long."""
        least, most = _PATIENCE_S
        patience_s = min(most, max(least, _PATIENCE * change_s))
        for run_id in self._believed.keys() - wanted.keys():
            del self._believed[run_id]
            self._fell.pop(run_id, None)
        for run_id, wants in wanted.items():
            if wants >= self._believed.get(run_id, 0.0):
                self._believed[run_id] = wants
                self._fell.pop(run_id, None)
                continue
            since, highest = self._fell.get(run_id, (now, wants))
            self._fell[run_id] = since, max(highest, wants)
            if now - since >= patience_s:
                self._believed[run_id] = max(highest, wants)
                self._fell[run_id] = now, wants
        return {run_id: wants for run_id, wants in self._believed.items() if wants > 0.0}


class ChangeoverTimes:
    """Learns how long workers take to change runs, without engine restarts; unknown ones get a typical time."""

    def __init__(self) -> None:
        self._known: dict[str, float] = {}  # by worker
        self._typical = CHANGE_S

    def learn(self, worker_id: str, seconds: float) -> None:
        """Note the time that a worker's change took."""
        self._typical = 0.5 * ((self._typical if self._known else seconds) + seconds)
        self._known[worker_id] = 0.5 * (self._known.get(worker_id, seconds) + seconds)

    def typical(self) -> float:
        return self._typical

    def estimate(self, worker_id: str) -> float:
        return self._known.get(worker_id, self._typical)

    def keep(self, workers: Collection[str]) -> None:
        """Forget all workers but these."""
        if len(self._known) > 2 * len(workers) + 16:
            self._known = {key: value for key, value in self._known.items() if key in workers}
