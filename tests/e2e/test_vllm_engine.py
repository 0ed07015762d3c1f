"""A real vLLM engine continues exactly, labels its tokens truly, and after an update equals one that was booted
fresh."""

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from ebbtide.types.rollout import FinishReason
from tests.e2e.facts import Facts, facts_of
from tests.e2e.tolerances import within
from tests.support.waiting import wait_until

CUTS = [1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45]
EXACT = within(1e-3)
#: Of the same weights, reached in different ways.
PARITY = within(1e-5)

pytestmark = pytest.mark.timeout(300)


def ask(*checkpoints: Path, further: Sequence[Sequence[int]] = ()) -> Facts:
    return facts_of("engine_facts", *checkpoints, told=further)


@pytest.fixture(scope="session")
def checkpoints(make_checkpoint: Callable[..., Path]) -> tuple[Path, Path]:
    return make_checkpoint(1), make_checkpoint(2)


@pytest.fixture(scope="session")
def updated(checkpoints: tuple[Path, Path], make_checkpoint: Callable[..., Path]) -> Facts:
    """An engine booted from the first checkpoint and updated to the second."""
    return ask(*checkpoints, make_checkpoint(3, tied=True))


@pytest.fixture(scope="session")
def fresh(checkpoints: tuple[Path, Path], updated: Facts) -> Facts:
    """An engine booted from the second checkpoint."""
    return ask(checkpoints[1], further=updated["longer"])


@pytest.fixture(scope="session")
def tied(make_checkpoint: Callable[..., Path]) -> tuple[Facts, Facts]:
    """The same of checkpoints with tied embeddings: updated and fresh."""
    first, second = make_checkpoint(3, tied=True), make_checkpoint(4, tied=True)
    return ask(first, second, make_checkpoint(5)), ask(second)


def same(one: Facts, other: Facts, start: int = 0, apart: float = EXACT) -> bool:
    """Whether `other` is `one` from token `start` on."""
    close = all(abs(a - b) <= apart for a, b in zip(one["logprobs"][start:], other["logprobs"], strict=True))
    return bool(one["ids"][start:] == other["ids"]) and close


def test_a_single_response_continues_exactly(updated: Facts) -> None:
    base = updated["base"]
    assert len(base["single"]["ids"]) == 48
    assert len(set(base["single"]["ids"])) > 3, "a response that repeats itself would prove nothing"
    assert same(base["single"], base["single_resumed"], 17)


def test_responses_cut_at_different_places_continue_exactly_together(updated: Facts) -> None:
    base = updated["base"]
    for whole, resumed, cut in zip(base["batch"], base["batch_resumed"], CUTS, strict=True):
        assert same(whole, resumed, cut)


def test_a_request_without_logprobs_has_the_same_tokens_and_nan_for_each(updated: Facts) -> None:
    base = updated["base"]
    assert base["without_logprobs"]["ids"] == base["single"]["ids"]
    assert all(math.isnan(logprob) for logprob in base["without_logprobs"]["logprobs"])
    assert len(base["without_logprobs"]["logprobs"]) == len(base["single"]["ids"])


def test_a_repetition_penalty_continues_exactly(updated: Facts) -> None:
    base = updated["base"]
    assert base["penalised"]["ids"] != base["single"]["ids"], "the penalty changed nothing"
    assert same(base["penalised"], base["penalised_resumed"], 17)


def test_a_stop_token_ends_a_response_and_is_its_last_token(updated: Facts) -> None:
    base = updated["base"]
    first = base["single"]["ids"].index(base["stop"])
    assert base["stopped"]["ids"] == base["single"]["ids"][: first + 1]
    assert len(base["stopped"]["logprobs"]) == first + 1
    assert base["stopped"]["finish"] == FinishReason.STOP


def test_a_stop_token_right_behind_the_cut_ends_the_response(updated: Facts) -> None:
    base = updated["base"]
    assert base["stopped_resumed"]["ids"] == [base["stop"]]
    assert base["stopped_resumed"]["finish"] == FinishReason.STOP


def test_no_stop_token_comes_within_min_tokens(updated: Facts) -> None:
    base = updated["base"]
    assert len(base["not_stopped"]["ids"]) > 40
    assert base["stop"] not in base["not_stopped"]["ids"][:40]


def check_parity(updated: Facts, fresh: Facts) -> None:
    for name in ("single", "single_resumed"):
        assert same(updated[name], fresh[name], apart=PARITY)
    for name in ("batch", "batch_resumed"):
        for one, other in zip(updated[name], fresh[name], strict=True):
            assert same(one, other)


def test_an_updated_engine_equals_a_fresh_one(updated: Facts, fresh: Facts) -> None:
    check_parity(updated["updated"], fresh["base"])
    assert updated["updated"]["single"]["ids"] != updated["base"]["single"]["ids"], "the update changed nothing"


def test_an_engine_that_goes_back_equals_what_it_was(updated: Facts) -> None:
    check_parity(updated["back"], updated["base"])
    assert set(updated["back"]["single"]["versions"]) == {7}


@pytest.mark.nightly  # test_vllm_install.py has a short case of it
def test_tied_embeddings_are_updated_like_all_else(tied: tuple[Facts, Facts]) -> None:
    updated, fresh = tied
    check_parity(updated["updated"], fresh["base"])
    check_parity(updated["back"], updated["base"])
    assert updated["updated"]["single"]["ids"] != updated["base"]["single"]["ids"], "the update changed nothing"


def test_no_prompt_is_read_by_weights_that_are_no_more(updated: Facts, fresh: Facts) -> None:
    """Its blocks were cached under the old weights, and it had been asked for before they were replaced."""
    assert same(updated["waiting"], fresh["base"]["batch"][-1])
    assert set(updated["waiting"]["versions"]) == {5}


def test_blocks_that_two_versions_made_are_not_found_again(updated: Facts, fresh: Facts) -> None:
    for one, other in zip(updated["behind"], fresh["further"], strict=True):
        assert same(one, other)


def test_nothing_of_a_file_is_held_after_its_install(updated: Facts) -> None:
    assert updated["files_kept"] == []


def test_every_token_is_labelled_with_the_version_that_made_it(updated: Facts) -> None:
    for response in updated["in_flight"]:
        assert set(response["versions"]) == {0, 5}
        assert response["versions"] == sorted(response["versions"])
        assert len(response["versions"]) == len(response["ids"]) == 200
    assert set(updated["base"]["single"]["versions"]) == {0}
    assert set(updated["updated"]["single"]["versions"]) == {5}
    assert 0 < updated["pause_s"] < 10


def test_weights_of_another_architecture_are_refused_and_the_old_ones_serve_on(updated: Facts) -> None:
    assert updated["refused"].startswith("InvalidRequest: weights: version 6 was refused")
    assert "lm_head.weight" in updated["refused"]
    assert updated["refused_torn"].startswith("InvalidRequest")
    assert same(updated["updated"]["single"], updated["after_refusal"])
    assert set(updated["after_refusal"]["versions"]) == {5}


def expected_logprobs(checkpoint: Path, ids: list[int], start: int, sampling: Facts) -> list[float]:
    """Logprobs of `ids[start:]` under the distribution sampled from, computed plainly."""
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, start - 1 : -1] / sampling["temperature"]
    ordered, order = logits.sort(descending=True)
    mass = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # of all that is more probable
    beyond = torch.arange(logits.shape[-1]) >= sampling.get("top_k", logits.shape[-1])
    ordered = ordered.masked_fill((mass >= sampling.get("top_p", 1.1)) | beyond, float("-inf"))
    kept = torch.empty_like(logits).scatter(-1, order, ordered)
    chosen = kept.log_softmax(-1).gather(-1, torch.tensor(ids[start:])[:, None])
    logprobs: list[float] = chosen[:, 0].tolist()
    return logprobs


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("sampled", {"temperature": 0.7, "top_p": 0.9}),
        ("top_k", {"temperature": 1.3, "top_k": 5}),
        ("batch", {"temperature": 1.0}),
    ],
)
def test_logprobs_are_those_of_the_distribution_sampled_from(
    fresh: Facts, checkpoints: tuple[Path, Path], name: str, sampling: Facts
) -> None:
    for prompt, response in zip(fresh["prompts"], fresh["base"][name], strict=True):
        wanted = expected_logprobs(checkpoints[1], prompt + response["ids"], len(prompt), sampling)
        assert response["logprobs"] == pytest.approx(wanted, abs=EXACT)


def test_the_end_of_sequence_token_is_known(fresh: Facts) -> None:
    assert fresh["eos"] == [127]


def test_the_tokenizer_is_loaded_before_the_first_stop_string_wants_it(fresh: Facts) -> None:
    from ebbtide.trainer.base_model.base_model import character_tokenizer

    assert fresh["text"] == character_tokenizer().decode([50, 51])


WORKER = """
import asyncio, sys
from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine
from ebbtide.rollout_worker.settings import VllmSettings
async def main():
    threads = int(sys.argv[2])
    settings = VllmSettings(dtype="float32", enforce_eager=True, max_model_len=128, threads=threads, kv_cache_mib=64)
    await VllmEngine(sys.argv[1], 4, settings).start()
    print("up", flush=True)
    await asyncio.sleep(600)
if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize(
    "threads",
    [pytest.param(1, id="forked"), pytest.param(0, id="spawned", marks=pytest.mark.nightly)],
)
async def test_a_killed_worker_takes_its_engine_with_it(
    checkpoints: tuple[Path, Path], tmp_path: Path, threads: int
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, str(script), str(checkpoints[0]), str(threads)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:  # noqa: ASYNC220
        assert worker.stdout is not None
        lines = iter(worker.stdout.readline, "")
        assert "up\n" in lines
        children = psutil.Process(worker.pid).children(recursive=True)
        assert any("EngineCore" in child.name() for child in children)
        os.kill(worker.pid, signal.SIGKILL)
    gone = {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    await wait_until(lambda: not any(child.is_running() and child.status() not in gone for child in children))
