"""A real vLLM engine under a guard's budget: nothing without one, the same tokens as ever with one, fair when it is
small, and new weights while it stands still."""

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.facts import Facts, facts_of

#: What a machine with other work on it adds to a step, or to a wake-up.
SLACK_S = 0.03

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint(1)


@pytest.fixture(scope="module")
def borrowed(checkpoint: Path, make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return facts_of("borrowed_facts", checkpoint, make_checkpoint(2), tmp_path_factory.mktemp("grants") / "w1.page")


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Facts:
    return facts_of("borrowed_facts", checkpoint)


def test_an_engine_boots_by_itself_and_is_then_left_without_a_budget(borrowed: Facts) -> None:
    steps, has_blocks, has_bytes, tokens = borrowed["boot"]
    assert steps == 1, "the warm-up is one token"
    assert has_blocks
    assert has_bytes
    assert tokens == 0


def test_nothing_is_computed_without_a_budget_and_next_to_no_processor_used(borrowed: Facts) -> None:
    assert borrowed["standing"]["steps"] == 0
    assert borrowed["standing"]["share"] < 0.1, "of one; an engine that looks again and again takes all of it"


def test_an_engine_without_a_budget_pauses_at_once(borrowed: Facts) -> None:
    assert borrowed["standing"]["paused_s"] < 0.3


def test_tokens_come_within_milliseconds_of_a_budget(borrowed: Facts) -> None:
    stopped = borrowed["stopped"]
    assert statistics.median(stopped["two_steps"]) < 2 * stopped["mean_step"] + SLACK_S


def test_a_reclaim_waits_for_one_step_at_most(borrowed: Facts) -> None:
    stopped = borrowed["stopped"]
    assert max(stopped["late"]) <= 0, "a step began behind the guard's back"
    assert statistics.median(stopped["reclaims"]) < stopped["mean_step"] + SLACK_S


def test_an_engine_stopped_many_times_says_what_one_says_that_never_was(borrowed: Facts, alone: Facts) -> None:
    assert len(borrowed["stopped"]["reclaims"]) == 40
    for one, other in zip(borrowed["outputs"], alone["outputs"], strict=True):
        assert one["ids"] == other["ids"]
        assert one["logprobs"] == other["logprobs"]


def test_a_small_budget_goes_round_and_starves_nobody(borrowed: Facts) -> None:
    shared = borrowed["shared"]
    assert shared["a_step"] <= 3
    assert min(shared["gained"]) >= 20
    assert max(shared["gained"]) - min(shared["gained"]) <= 4


def test_weights_are_installed_while_an_engine_is_paused(borrowed: Facts) -> None:
    updated = borrowed["updated"]
    assert updated["install_s"] < 10
    for response in updated["in_flight"]:
        assert set(response["versions"]) == {0, 5}
        assert response["versions"] == sorted(response["versions"])
        assert len(response["ids"]) == 200
