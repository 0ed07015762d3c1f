"""The part `switches`: a real device goes back and forth between a trainer and an engine, under kills."""

import asyncio
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.elastic.elastic_part import PartFindings, PartTerms
from benchmarks.elastic.switches.switch_accounts import findings
from benchmarks.elastic.switches.switch_run import KILLED, SwitchPlan, switched_run

#: Switches in full, and in a run of three minutes.
_FULL: Final = 200
_QUICK: Final = 20
#: A step is a switch, but for those for which a killed worker boots: a few of each ten.
_STEPS: Final = 1.3
#: Steps between two kills. A program that is killed again within half a minute counts as one that cannot be kept up, so
#: a run with several kills of each needs room between them.
_SPACING, _QUICK_SPACING = 8, 3


def plan_of(*, quick: bool, switches: int | None) -> SwitchPlan:
    """The first half of the steps is left alone: undisturbed switches are timed. Then each program is killed, as often
    as there is room.
    """
    wanted = switches or (_QUICK if quick else _FULL)
    steps = round(_STEPS * wanted)
    spacing = _SPACING if steps > 2 * len(KILLED) * _SPACING else _QUICK_SPACING
    kills = (steps // 2) // spacing
    return SwitchPlan(
        steps=steps, kills=kills - kills % len(KILLED) if kills >= len(KILLED) else kills, spacing=spacing
    )


def measured(terms: PartTerms) -> PartFindings:
    """See `switch_accounts`. Takes some seconds for each switch, and a minute to boot."""
    plan = plan_of(quick=terms.quick, switches=terms.switches)
    with tempfile.TemporaryDirectory(prefix="ebb-switches-") as directory:
        found = findings(asyncio.run(switched_run(Path(directory), plan, seed=terms.seed, tell=terms.tell)))
    skipped = {} if found.switch_steps_p99 is not None else {"switch_steps_p99": "no switch was far from a kill"}
    return PartFindings(
        figures={"switch_steps_p99": found.switch_steps_p99},
        skipped=skipped,
        details=found,
        failures=tuple(found.failures()),
    )
