"""Mixtures and models with tied weights that the built-in trainer trained are the same models in an engine."""

import pytest

from ebbtide.rollout_worker.engine.vllm import cpu_build
from tests.e2e.facts import Facts, facts_of

#: In nats, in float32: two libraries compute the same network.
CLOSE = 1e-3

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    if not cpu_build.is_cpu_build():
        pytest.skip("these are a CPU build's facts")
    return facts_of("trained_facts", tmp_path_factory.mktemp("trained"))


@pytest.mark.parametrize("model", ["experts", "tied"])
def test_an_engine_finds_the_trainers_logprobs_before_and_after_a_version(seen: Facts, model: str) -> None:
    facts = seen[model]
    for when in ("before", "after"):
        pairs = zip(facts[when]["logprobs"], facts[when]["trainer"], strict=True)
        assert max(abs(ours - theirs) for ours, theirs in pairs) <= CLOSE, when
    moved = [abs(a - b) for a, b in zip(facts["before"]["logprobs"], facts["after"]["logprobs"], strict=True)]
    assert max(moved) > 100 * CLOSE, "the version changed nothing"


def test_experts_are_told_apart_and_tied_weights_once(seen: Facts) -> None:
    assert sum(".experts." in name for name in seen["experts"]["names"]) == 2 * 4 * 3
    assert "lm_head.weight" not in seen["tied"]["names"]
