"""Keeps the results of simulations, and makes those that are missing in several processes.

Invariant: a file's name is a digest of all that its content depends on: the code, the case with its input files, and
the policy. What was simulated under anything else is never found. A result is on disk before the next one is told.
"""

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from benchmarks.elastic.compared.simulating_processes import each_simulated
from benchmarks.elastic.elastic_figures import SimulatedResult, result_of
from benchmarks.elastic.elastic_policies import COMPARED, ORACLE
from benchmarks.elastic.elastic_setting import ElasticCase, simulation
from benchmarks.log_level import errors_only

_ROOT: Final = Path(__file__).parents[3]
_CODE: Final = (
    "common/ebbtide/step_pacing.py",
    "services/ebbtide/trainer/lending",
    "services/ebbtide/coordinator",
    "lab/ebbtide/simulator",
    "benchmarks/elastic/assumptions.py",
    "benchmarks/elastic/elastic_policies.py",
    "benchmarks/elastic/elastic_setting.py",
    "benchmarks/elastic/window_oracle.py",
    "benchmarks/simulator/published",
)


class WantedSimulation(NamedTuple):
    case: ElasticCase
    policy: str


class KeptSimulations:
    """Below `folder`. `tell`: one line for people who wait."""

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._tell, self._common = folder, tell, code_digest()

    def results(self, wanted: Sequence[WantedSimulation], jobs: int) -> list[SimulatedResult]:
        """All that are wanted, in their order. `jobs`: processes at a time."""
        found = {one: kept for one in wanted if (kept := self._kept(one)) is not None}
        missing = sorted((one for one in dict.fromkeys(wanted) if one not in found), key=_costly)
        self._tell(f"{len(wanted)} simulations, {len(found)} of them kept from before")
        begin_s = time.monotonic()
        runs = each_simulated(_simulated, missing, jobs, lambda one: f"{one.case.name}: {one.policy}")
        for number, (one, result) in enumerate(runs, start=1):
            found[one] = result
            self._keep(one, result)
            left_s = (time.monotonic() - begin_s) / number * (len(missing) - number)
            told = f"{result.tokens_per_s:.0f} tokens/s ({result.cpu_s} s; some {left_s / 60:.0f} min left)"
            self._tell(f"{number}/{len(missing)} {one.case.name}: {one.policy} makes {told}")
        return [found[one] for one in wanted]

    def _kept(self, one: WantedSimulation) -> SimulatedResult | None:
        path = self._path(one)
        return msgspec.json.decode(path.read_bytes(), type=SimulatedResult) if path.exists() else None

    def _keep(self, one: WantedSimulation, result: SimulatedResult) -> None:
        path = self._path(one)
        beside = path.with_suffix(".part")
        beside.write_bytes(msgspec.json.encode(result))
        beside.replace(path)

    def _path(self, one: WantedSimulation) -> Path:
        digest = hashlib.blake2b(f"{self._common} {one.policy} {one.case.told}".encode(), digest_size=12)
        for file in one.case.files:
            digest.update(file.read_bytes())
        return self._folder / f"{digest.hexdigest()}.json"


def code_digest() -> str:
    """Of the sources that a simulation depends on."""
    digest = hashlib.blake2b(digest_size=8)
    roots = [_ROOT / name for name in _CODE]
    for path in sorted(path for root in roots for path in (root.rglob("*.py") if root.is_dir() else [root])):
        digest.update(f"{path.relative_to(_ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _costly(one: WantedSimulation) -> bool:
    """The longest come first: the oracle's."""
    return one.policy != ORACLE


def _simulated(one: WantedSimulation) -> SimulatedResult:
    errors_only()
    begin_s = sum(os.times()[:4])  # with the oracle's copies
    compared = COMPARED[one.policy]
    outcome = simulation(one.case, compared.policy(one.case), compared.fleet(one.case)).run(lambda _: None)
    return result_of(one.case.name, one.policy, outcome, sum(os.times()[:4]) - begin_s)
