"""Whether a training fits is known from its model's files before anything is loaded."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ebbtide.errors import InvalidRequest
from ebbtide.trainer import memory_estimate, trainer_preflight
from ebbtide.trainer.memory_estimate import Card, MemoryPlan, ModelShape, check_fit, estimate, read_shape
from ebbtide.trainer.settings import TrainerSettings
from tests.unit.trainer.test_preflight import make_spec

GB = 10**9
#: Qwen3-8B, by its published configuration.
EIGHT = ModelShape(
    parameters=8_190_735_360,
    layers=36,
    layer=192_946_432,
    edge=1_244_663_808,
    vocabulary=151_936,
    hidden=4096,
    attended=6144,
    inner=12288,
)
PLAN = MemoryPlan(ranks=8, micro_batch_tokens=16384, longest=4096)


def files(folder: Path, tensors: dict[str, list[int]], **config: Any) -> Path:
    """A model's files whose weights are left out: only headers are read."""
    folder.mkdir()
    for number, (name, shape) in enumerate(tensors.items()):
        header = json.dumps(
            {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}, "__metadata__": {}}
        ).encode()
        (folder / f"model-{number}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


TENSORS = {
    "model.embed_tokens.weight": [100, 8],
    "model.layers.0.mlp.up_proj.weight": [16, 8],
    "model.layers.0.self_attn.q_proj.weight": [8, 8],
    "model.layers.1.mlp.up_proj.weight": [16, 8],
    "model.norm.weight": [8],
}
CONFIG: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 100,
    "intermediate_size": 16,
}


def test_a_models_files_give_its_shape_whatever_their_number(tmp_path: Path) -> None:
    shape = read_shape(files(tmp_path / "dense", TENSORS, **CONFIG))
    assert shape == ModelShape(
        parameters=1128, layers=2, layer=192, edge=808, vocabulary=100, hidden=8, attended=16, inner=16
    )
    mixture = {**CONFIG, "num_experts_per_tok": 4, "moe_intermediate_size": 6}
    found = read_shape(files(tmp_path / "mixture", TENSORS, text_config=mixture))
    assert found is not None
    assert found.inner == 24  # of a token's experts together
    assert read_shape(files(tmp_path / "unknown", TENSORS, hidden_size=8)) is None
    (tmp_path / "dense" / "model-0.safetensors").write_bytes(b"\xff" * 64)
    assert read_shape(tmp_path / "dense") is None
    assert read_shape(tmp_path / "nowhere") is None


def test_ranks_offload_and_tokens_change_what_they_should() -> None:
    eight = estimate(EIGHT, PLAN)
    assert eight.state == pytest.approx(16 * EIGHT.parameters / 8)
    away = estimate(EIGHT, replace(PLAN, offload=True))
    assert away.host == EIGHT.parameters
    assert eight.state - away.state == pytest.approx(EIGHT.parameters, rel=0.5)
    assert away.activations == eight.activations
    longer = estimate(EIGHT, replace(PLAN, longest=32768))
    assert longer.activations == 2 * eight.activations
    assert longer.state == eight.state
    plain = estimate(EIGHT, replace(PLAN, checkpointing=False))
    assert plain.activations > 10 * eight.activations


def test_what_fits_passes_and_what_cannot_is_refused_with_what_would() -> None:
    assert check_fit(EIGHT, PLAN, 80 * GB) == ""
    one = replace(PLAN, ranks=1)
    with pytest.raises(InvalidRequest, match="take 2 ranks with offload") as caught:
        check_fit(EIGHT, one, 80 * GB, name="NVIDIA H100")
    assert "of NVIDIA H100's 80" in str(caught.value)
    assert caught.value.field == "model"
    with pytest.raises(InvalidRequest, match="take a smaller model") as caught:
        check_fit(EIGHT, one, 8 * GB)
    many = replace(PLAN, micro_batch_tokens=1 << 18)
    with pytest.raises(InvalidRequest, match=r"trainer\.micro_batch_tokens: .*set it to (\d+)$") as caught:
        check_fit(EIGHT, many, 80 * GB)
    fits = int(str(caught.value).rpartition(" ")[2])
    assert 16384 < fits < 1 << 18
    assert check_fit(EIGHT, replace(PLAN, micro_batch_tokens=fits), 80 * GB) == ""
    assert check_fit(EIGHT, replace(PLAN, micro_batch_tokens=fits + 256), 80 * GB) != ""


def test_offload_is_named_where_it_is_enough() -> None:
    two = replace(PLAN, ranks=2, micro_batch_tokens=8192)
    with pytest.raises(InvalidRequest, match=r"set offload of the trainer \(EBBTIDE_OFFLOAD=true\)") as caught:
        check_fit(EIGHT, two, 64 * GB)
    assert "and this to" not in str(caught.value)
    assert check_fit(EIGHT, replace(two, offload=True), 64 * GB) == ""


def test_submit_warns_of_what_this_hosts_gpu_cannot_train_and_says_nothing_where_there_is_none(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, spec = TrainerSettings(allowed_trainers=("*",)), make_spec(tiny_model)
    for card, refused in (
        (None, False),
        (Card(name="a card", memory=80 * GB), False),
        (Card(name="a card", memory=2), True),
    ):
        monkeypatch.setattr(memory_estimate, "smallest_card", lambda device, ranks, card=card: card)
        said = trainer_preflight.check(spec, settings)
        assert ("would refuse" in said, "of a card's 0" in said) == (refused, refused), "the trainer may have others"


def test_the_estimate_lies_a_little_above_the_learners_own_tensors() -> None:
    found = json.loads((Path(__file__).parents[3] / "benchmarks/results/trainer_memory.json").read_text())
    computed = next(one for one in found["cases"] if one["name"] == "8B on eight")
    plan = MemoryPlan(ranks=8, micro_batch_tokens=computed["tokens"], longest=computed["tokens"])
    assert computed["parameters"] == EIGHT.parameters
    assert 1.0 < estimate(EIGHT, plan).device / computed["peak_bytes"] < 1.2
    for one in found["cases"]:
        assert 1.0 < one["estimated_bytes"] / one["peak_bytes"] < 1.2
        assert one["holds"]
