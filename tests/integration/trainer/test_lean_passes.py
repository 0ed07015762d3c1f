"""Chunks of the head, packed rows, activations that are computed again and offloaded moments leave a step's gradient as
it is, on one rank and on two."""

from pathlib import Path

import msgspec
import pytest
import torch

from ebbtide.trainer.learning import learner
from ebbtide.trainer.learning.network import load_network, load_tokenizer, save_network
from tests.integration.trainer.fixed_training import Job, alone, make_spec
from tests.integration.trainer.streamed_gradients import gradient, together

#: Of the norm of the difference to that of the gradient, in float32.
TOLERANCE = 1e-5
#: Some three rows of the tiny model's logits.
FEW_LOGITS = 400


def job(model: Path, folder: Path, name: str, **trainer: bool | int) -> Job:
    """A step of several micro-batches, with stale tokens and a KL term, on unclipped gradients."""
    spec = make_spec(model, minibatches=1, max_grad_norm=1e9, **trainer)
    return Job(spec=spec, folder=str(folder / name), steps=(0, 1), saves=(1,), groups=12)


def tied(model: Path, folder: Path) -> Path:
    network, tokenizer = load_network(model), load_tokenizer(model)
    network.config.tie_word_embeddings = True
    network.tie_weights()
    save_network(network, tokenizer, folder / "tied")
    return folder / "tied"


@pytest.mark.timeout(400)
def test_lean_passes_on_one_rank_and_on_two_give_the_plain_gradient(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {"untied": tiny_model, "tied": tied(tiny_model, tmp_path)}
    lean: dict[str, bool | int] = {"packing": True, "gradient_checkpointing": True, "micro_batch_tokens": 60}
    jobs = {
        (kind, ranks): msgspec.structs.replace(
            job(model, tmp_path, f"{ranks}-{kind}", **lean), chunk_logits=FEW_LOGITS, offload=True
        )
        for kind, model in models.items()
        for ranks in ("one", "two")
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    told = {kind: alone(job(model, tmp_path, f"plain-{kind}"))[0] for kind, model in models.items()}
    both = dict(zip(models, together([jobs[kind, "two"] for kind in models], tmp_path), strict=True))
    monkeypatch.setattr(learner, "CHUNK_LOGITS", FEW_LOGITS)
    found = {(kind, "one"): alone(jobs[kind, "one"])[0] for kind in models}
    found |= {(kind, "two"): both[kind][0] for kind in models}
    torch.set_num_threads(threads)
    for (kind, ranks), own in found.items():
        plain = gradient(tmp_path, f"plain-{kind}", models[kind])
        error = float((gradient(tmp_path, f"{ranks}-{kind}", models[kind]) - plain).norm() / plain.norm())
        assert 0 < error < TOLERANCE, (kind, ranks, error)
        assert own == pytest.approx(told[kind], rel=1e-4, abs=1e-6), (kind, ranks)
