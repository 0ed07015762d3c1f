"""A worker's engine that is started anew for another architecture is what a fresh one would be, and finds back."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ebbtide.rollout_worker.engine import cpu
from tests.e2e.changed_facts import VERSION
from tests.e2e.test_vllm_install import EXACT, Facts, facts_of, same

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def checkpoints(make_checkpoint: Callable[..., Path]) -> tuple[Path, Path]:
    return make_checkpoint(1), make_checkpoint(2, hidden_size=160, layers=3)


@pytest.fixture(scope="module")
def changed(checkpoints: tuple[Path, Path]) -> Facts:
    if not cpu.is_cpu_build():
        pytest.skip("these are a CPU build's facts")
    return facts_of("changed_facts.py", *checkpoints)


@pytest.fixture(scope="module")
def fresh(changed: Facts, checkpoints: tuple[Path, Path]) -> Facts:
    return facts_of("changed_facts.py", checkpoints[1])


def test_a_changed_engine_equals_a_fresh_one_of_that_architecture(changed: Facts, fresh: Facts) -> None:
    assert same(changed["after"]["single"], fresh["after"]["single"], EXACT)
    for one, other in zip(changed["after"]["batch"], fresh["after"]["batch"], strict=True):
        assert same(one, other, EXACT)
    assert set(changed["after"]["single"]["versions"]) == {VERSION}
    assert changed["after"]["single"]["ids"] != changed["before"]["single"]["ids"]


def test_the_worker_goes_on_while_its_engine_is_started_anew(changed: Facts) -> None:
    assert changed["change_s"] > 1.0
    assert changed["stood_still_s"] < changed["change_s"] / 2
    first, second = changed["infos"]
    assert first["architecture"] != second["architecture"]
    assert second["model"] == "another"


def test_one_engine_at_a_time_and_none_behind_the_last(changed: Facts) -> None:
    assert (changed["processes"], changed["left"]) == (1, 0)


def test_a_model_that_does_not_start_leaves_the_engine_that_there_was(changed: Facts) -> None:
    assert "NoSuchModel" in changed["refusal"]
    assert changed["back"] == changed["infos"][0]
    assert same(changed["again"]["single"], changed["before"]["single"], EXACT)
