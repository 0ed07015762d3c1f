"""Reads how many tokens the guard got beside each of ROSE's settings, from what `make bench-coserving` measured.

The pair of engines is real, and needs a machine of its own for longer than this benchmark takes. So it is measured by
that benchmark, and its worst cell is taken over here with the conditions that it was measured under.
"""

import json
from typing import Any, Final

from benchmarks.elastic.elastic_part import PartFindings, PartTerms
from benchmarks.pair.over_rose import comparisons

_FIGURE: Final = "real_tokens_over_rose"


def measured(terms: PartTerms) -> PartFindings:
    """The least ratio over all traces and loads, beside ROSE's settings that are as good to users."""
    path = terms.coserving
    if not path.is_file():
        return _skipped(f"there is no {path.name}; run `make bench-coserving` first, or name its file by --coserving")
    told: dict[str, Any] = json.loads(path.read_text())
    counting = [one for one in comparisons(told.get("cells", [])) if one.counts]
    if not counting:
        return _skipped(f"{path.name} has no setting of ROSE that is as good to users as the guard")
    worst = min(counting, key=lambda one: one.ratio)
    found = {"file": path.name, "conditions": told.get("conditions", {}), "worst": worst}
    return PartFindings(figures={_FIGURE: round(worst.ratio, 4)}, details=found)


def _skipped(reason: str) -> PartFindings:
    return PartFindings(figures={_FIGURE: None}, skipped={_FIGURE: reason})
