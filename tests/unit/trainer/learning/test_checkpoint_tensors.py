"""Networks are published under the names that their files have, whatever transformers keeps together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ebbtide.trainer.base_model.base_model import character_tokenizer
from ebbtide.trainer.learning import checkpoint_tensors
from ebbtide.trainer.learning.checkpoint_tensors import own_tensors, published
from ebbtide.trainer.learning.learner import Learner, LearnerSettings
from ebbtide.trainer.learning.network import Network, load_network, save_network
from tests.unit.trainer.learning.test_learner import recorded, sample

EXPERTS = 4


def mixture(kind: str) -> Network:
    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": len(character_tokenizer()),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    }
    if kind == "mixtral":
        config = MixtralConfig(**common, num_local_experts=EXPERTS, intermediate_size=24)
        return MixtralForCausalLM(config).float().eval()
    moe = Qwen3MoeConfig(**common, num_experts=EXPERTS, moe_intermediate_size=24, intermediate_size=48)
    return Qwen3MoeForCausalLM(moe).float().eval()


def files(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_a_mixture_is_published_as_its_files_name_it_and_loads_with_equal_logits(kind: str, tmp_path: Path) -> None:
    save_network(mixture(kind), character_tokenizer(), tmp_path / "made")
    network = load_network(tmp_path / "made")
    samples = [recorded(network, sample(12, 6, advantage=sign)) for sign in (1.0, -1.0)]
    Learner(network, LearnerSettings(learning_rate=1e-2), version=3).accumulate(samples)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)
    told = dict(published(network, checkpoint_tensors.checkpoint_tensors(network)))
    assert told.keys() == files(tmp_path / "made").keys()
    assert sum(".experts." in name for name in told) == 2 * EXPERTS * 3
    moved = [name for name, one in files(tmp_path / "made").items() if not torch.equal(one, told[name])]
    assert sum(".experts." in name for name in moved) > EXPERTS
    save_network(network, character_tokenizer(), tmp_path / "saved")
    assert all(torch.equal(one, told[name]) for name, one in files(tmp_path / "saved").items())
    installed = tmp_path / "installed"
    save_network(network, character_tokenizer(), installed)
    for path in installed.glob("*.safetensors"):
        path.unlink()
    save_file({name: one.contiguous() for name, one in told.items()}, installed / "model.safetensors", {"format": "pt"})
    ids = torch.from_numpy(samples[0].ids)[None]
    with torch.no_grad():
        ours, theirs = network(ids).logits, AutoModelForCausalLM.from_pretrained(installed).float().eval()(ids).logits
    assert torch.equal(ours, theirs)


def test_parameters_are_published_in_the_dtype_of_computation_and_buffers_in_their_own(network: Network) -> None:
    network.register_buffer("e_score_correction_bias", torch.ones(4))
    named = checkpoint_tensors.checkpoint_tensors(network)
    told = {name: one.dtype for name, one in published(network, named, torch.bfloat16)}
    assert told.pop("e_score_correction_bias") is torch.float32
    assert set(told.values()) == {torch.bfloat16}


def test_a_dense_network_keeps_its_names_and_tied_weights_are_told_once(network: Network) -> None:
    assert {one.name for one in checkpoint_tensors.checkpoint_tensors(network)} == dict(own_tensors(network)).keys()
    network.config.tie_word_embeddings = True
    network.tie_weights()
    named = checkpoint_tensors.checkpoint_tensors(network)
    assert "lm_head.weight" not in {one.name for one in named}
    assert all(one.name == one.source for one in named)


@pytest.mark.parametrize(
    "change", [lambda rows: rows.flip(0), lambda rows: rows[::2], lambda rows: rows.transpose(0, 1).contiguous()]
)
def test_where_rows_are_not_cut_alone_tensors_keep_their_names(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    def convert(network: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: change(rows) if "gate_up" in name else rows for name, rows in tensors.items()}

    monkeypatch.setattr(checkpoint_tensors, "revert_weight_conversion", convert)
    network = mixture("qwen3_moe")
    named = checkpoint_tensors.checkpoint_tensors(network)
    assert [one.name for one in named] == [one.source for one in named] == [name for name, _ in own_tensors(network)]
