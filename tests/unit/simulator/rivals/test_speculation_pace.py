"""The model of grouped speculation says what Seer printed, and pays only where steps have room."""

import pytest

from benchmarks.rivals.tail.sibling_drafts import PRINTED, sibling_survival
from benchmarks.rivals.tail.speculation_pace import speculation_gain
from ebbtide.simulator.engines.engine_profile import StepCosts

MEMORY_BOUND = StepCosts(base_s=0.02, token_s=1e-6)
COMPUTE_BOUND = StepCosts(base_s=1e-6, token_s=1e-3)


@pytest.mark.parametrize(("siblings", "tokens"), PRINTED)
def test_drafts_from_so_many_siblings_gain_what_is_printed(siblings: float, tokens: float) -> None:
    assert 1.0 + sum(sibling_survival(siblings)) == pytest.approx(tokens, abs=1e-3)


def test_more_siblings_never_gain_less() -> None:
    found = [sum(sibling_survival(siblings / 4)) for siblings in range(80)]
    assert found == sorted(found)


def test_where_memory_binds_drafts_gain_their_tokens_and_where_arithmetic_binds_nothing() -> None:
    survivals, probes = [sibling_survival(15)] * 8, [False] * 8
    assert speculation_gain(MEMORY_BOUND, survivals, probes, 8_000) == pytest.approx(2.53, rel=0.05)
    assert speculation_gain(COMPUTE_BOUND, survivals, probes, 8_000) == pytest.approx(1.0)
