"""A real engine on a GPU gives the device's memory back when it sleeps, and goes on exactly when it wakes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ebbtide.rollout_worker.engine.vllm import cpu_build
from tests.e2e.facts import Facts, facts_of

pytestmark = pytest.mark.timeout(600)

#: What the engine keeps on the device beside its pool, and what other programs may take meanwhile.
SLACK = 64 << 20


@pytest.fixture(scope="module")
def facts(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Facts:
    if cpu_build.is_cpu_build():
        pytest.skip("vLLM's sleep mode needs a GPU; tests/e2e/test_vllm_kv_budget.py has the rest on CPUs")
    pytest.importorskip("pynvml", reason="reads the device's memory")
    page = tmp_path_factory.mktemp("grants") / "worker.page"
    return facts_of("sleep_facts", make_checkpoint(1), page, within_s=560)


def test_all_memory_of_weights_and_cache_is_the_devices_again_at_either_level(facts: Facts) -> None:
    for sleep in facts["sleeps"]:
        assert sleep["freed"] >= facts["weights"] + facts["cache"] - SLACK, sleep["level"]


def test_a_woken_engine_takes_no_more_than_it_gave(facts: Facts) -> None:
    for sleep in facts["sleeps"]:
        assert sleep["taken"] <= sleep["freed"] + SLACK, sleep["level"]


def test_requests_that_were_under_way_and_later_ones_are_answered_as_ever(facts: Facts) -> None:
    for sleep in facts["sleeps"]:
        for answers in (sleep["answers"], sleep["after"]):
            assert [one["ids"] for one in answers] == [one["ids"] for one in facts["whole"]], sleep["level"]


def test_all_memory_of_the_cache_alone_is_the_devices_again_and_requests_go_on_behind_it(facts: Facts) -> None:
    release = facts["release"]
    assert facts["cache"] - SLACK <= release["freed"] <= facts["cache"] + SLACK
    assert release["taken"] <= release["freed"] + SLACK
    assert [one["ids"] for one in release["answers"]] == [one["ids"] for one in facts["whole"]]
