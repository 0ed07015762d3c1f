"""A real vLLM engine scores prompts as vLLM itself does, and as the model says, whatever is cached or installed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.facts import Facts, facts_of
from tests.e2e.scoring_facts import ALTERNATIVES, PROMPTS
from tests.e2e.tolerances import within

#: Of logprobs in float32 that two programs compute, or one program in batches of other sizes.
EXACT = within(1e-4)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="session")
def checkpoints(make_checkpoint: Callable[..., Path]) -> tuple[Path, Path]:
    return make_checkpoint(11), make_checkpoint(12)


@pytest.fixture(scope="session")
def facts(checkpoints: tuple[Path, Path]) -> Facts:
    return facts_of("scoring_facts", *checkpoints)


def own_logprobs(scored: Facts) -> list[float]:
    """Of the prompt's tokens behind the first, and of the sampled one."""
    return [place[0][1] for place in scored["places"]]


def modelled(checkpoint: Path, ids: list[int]) -> list[list[float]]:
    """The logprobs of the whole vocabulary behind each token, computed plainly."""
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        logprobs: list[list[float]] = model(torch.tensor([ids])).logits[0].log_softmax(-1).tolist()
    return logprobs


def test_a_prompt_has_the_logprobs_that_vllm_gives_its_own_clients(facts: Facts) -> None:
    for ids, scored, direct in zip(PROMPTS, facts["again"], facts["direct"], strict=True):
        first, *others = direct
        assert first is None
        assert [place[0][0] for place in scored["places"][:-1]] == ids[1:]
        for place, known in zip(scored["places"][:-1], others, strict=True):
            assert {str(token): [logprob, rank] for token, logprob, rank in place} == {
                token: pytest.approx(found, abs=EXACT) for token, found in known.items()
            }


def check_model(checkpoint: Path, scored: list[Facts]) -> None:
    for ids, one in zip(PROMPTS, scored, strict=True):
        wanted = modelled(checkpoint, ids)
        for place, token, known in zip(one["places"], [*ids[1:], *one["ids"]], wanted, strict=True):
            (own, logprob, rank), *alternatives = place
            assert own == token
            assert logprob == pytest.approx(known[token], abs=EXACT)
            assert [found for _, found, _ in alternatives] == pytest.approx(
                sorted(known, reverse=True)[:ALTERNATIVES], abs=EXACT
            )
            assert [found for _, _, found in alternatives] == [1, 2, 3]
            above = sum(other > logprob + EXACT for other in known)
            assert above < rank <= 1 + sum(other >= logprob - EXACT for other in known)


def test_a_prompt_has_the_logprobs_of_the_model(facts: Facts, checkpoints: tuple[Path, Path]) -> None:
    check_model(checkpoints[0], facts["first"])
    check_model(checkpoints[1], facts["updated"])


def test_neither_a_cache_nor_other_prompts_nor_alternatives_change_a_score(facts: Facts) -> None:
    for first, again in zip(facts["first"], facts["again"], strict=True):
        assert len(again["places"]) == len(first["places"])
        assert own_logprobs(again) == pytest.approx(own_logprobs(first), abs=EXACT)
    for first, beside in zip(facts["first"] * 3, facts["together"], strict=True):
        assert own_logprobs(beside) == pytest.approx(own_logprobs(first), abs=EXACT)
    assert own_logprobs(facts["own"]) == pytest.approx(own_logprobs(facts["first"][2]), abs=EXACT)
    assert {len(place) for place in facts["own"]["places"]} == {1}


def test_one_version_makes_all_scores_of_a_prompt(facts: Facts) -> None:
    old, new = own_logprobs(facts["first"][2]), own_logprobs(facts["updated"][2])
    assert max(abs(a - b) for a, b in zip(old, new, strict=True)) > 0.01, "the update changed nothing"
    assert facts["waiting"]["versions"] == [5]
    assert own_logprobs(facts["waiting"]) == pytest.approx(new, abs=EXACT)
    versions = [one["versions"][0] for one in facts["within"]]
    assert set(versions) == {5, 7}, "no weights were replaced in the middle"
    for one, version in zip(facts["within"], versions, strict=True):
        assert own_logprobs(one) == pytest.approx(new if version == 5 else old, abs=EXACT)
