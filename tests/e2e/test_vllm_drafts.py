"""With drafts from their groups, rollouts come token for token as without: greedy, in float32, cut and resumed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.facts import facts_of
from tests.e2e.tolerances import within

#: What rounding may do to a logprob where a token is verified in another batch than it would be generated in.
CLOSE = within(1e-3)

pytestmark = pytest.mark.timeout(900)  # the first test waits for two engines

Facts = dict[str, Any]


@pytest.fixture(scope="module")
def engines(make_checkpoint: Callable[..., Path]) -> tuple[Facts, Facts]:
    """What is said without drafts, and with them."""
    base, other = make_checkpoint(1), make_checkpoint(2)
    plain, drafted = (facts_of("drafted_facts", base, other, mode, within_s=420.0) for mode in ("off", "grouped"))
    return plain, drafted


@pytest.mark.parametrize("weights", ["groups", "installed"])
def test_greedy_tokens_are_those_without_drafts_also_behind_cuts(engines: tuple[Facts, Facts], weights: str) -> None:
    for plain, drafted in zip(*(engine[weights] for engine in engines), strict=True):
        for one, other in zip(plain, drafted, strict=True):
            assert other["ids"] == one["ids"]
            assert other["versions"] == one["versions"]
            assert other["logprobs"] == pytest.approx(one["logprobs"], abs=CLOSE)


@pytest.mark.parametrize("kind", ["stopped", "held"])
def test_end_tokens_count_behind_drafts_as_without(engines: tuple[Facts, Facts], kind: str) -> None:
    assert engines[1][kind]["ids"] == engines[0][kind]["ids"]


def test_most_tokens_of_alike_members_are_drafted_and_accepted(engines: tuple[Facts, Facts]) -> None:
    own = engines[1]["own"]
    assert own["accepted"] > 100
    assert own["accepted"] > own["drafted"] / 3


def test_what_a_moved_rollout_brings_along_is_drafted_from(engines: tuple[Facts, Facts]) -> None:
    own, moved = engines[1]["own"], engines[1]["moved"]
    assert engines[1]["late"]["ids"] == engines[0]["installed"][1][0]["ids"]
    assert moved["accepted"] > own["accepted"] + 30


def test_trees_are_given_back_when_other_weights_are_installed(engines: tuple[Facts, Facts]) -> None:
    assert engines[1]["moved"]["tree_bytes"] > 0
    assert engines[1]["replaced"]["tree_bytes"] == engines[1]["replaced"]["groups"] == 0
