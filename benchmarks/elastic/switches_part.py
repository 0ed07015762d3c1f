"""The part `switches`: a real device goes back and forth between a trainer and an engine, under kills."""

import asyncio
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.elastic.elastic_part import PartFindings, PartTerms
from benchmarks.elastic.switches.switch_accounts import findings
from benchmarks.elastic.switches.switch_run import SPACING, switched_run

#: Switches in full, and in a run of three minutes.
_FULL: Final = 200
_QUICK: Final = 16
#: Steps before the first kill, at least: undisturbed switches are timed.
_CALM: Final = 8


def size_of(*, quick: bool, switches: int | None) -> tuple[int, int]:
    """Steps, with a switch in each, and kills: one in each `SPACING` steps behind the calm ones of the first half, but
    at least one of each program; of fewer in a quick run.
    """
    steps = switches or (_QUICK if quick else _FULL)
    return steps, max(0, min(steps - _CALM, max(steps // 2, 4 * SPACING)) // SPACING)


def measured(terms: PartTerms) -> PartFindings:
    """See `switch_accounts`. Takes some seconds for each switch, and a minute to boot."""
    steps, kills = size_of(quick=terms.quick, switches=terms.switches)
    with tempfile.TemporaryDirectory(prefix="ebb-switches-") as directory:
        found = findings(
            asyncio.run(switched_run(Path(directory), steps=steps, kills=kills, seed=terms.seed, tell=terms.tell))
        )
    skipped = {} if found.switch_steps_p99 is not None else {"switch_steps_p99": "no switch was far from a kill"}
    return PartFindings(
        figures={"switch_steps_p99": found.switch_steps_p99},
        skipped=skipped,
        details=found,
        failures=tuple(found.failures()),
    )
