import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ebbtide.errors import InvalidRequest
from ebbtide.run_client import check_model_directory
from ebbtide.trainer.base_model.base_model import character_tokenizer
from ebbtide.trainer.learning.network import Network, load_network, load_tokenizer, save_network


def refusal(directory: Path) -> str:
    with pytest.raises(InvalidRequest) as caught:
        load_network(directory)
    assert caught.value.field == "model"
    return str(caught.value)


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_is_saved_is_loaded_again_bit_for_bit(network: Network, checkpoint: Path) -> None:
    loaded = load_network(checkpoint)
    assert not loaded.training
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    assert not list(checkpoint.glob("*.bin"))
    assert all(path.stat().st_mode & 0o004 for path in (checkpoint, *checkpoint.iterdir())), "others may read it"


def test_saving_again_replaces_the_whole_and_leaves_nothing_beside(network: Network, checkpoint: Path) -> None:
    (checkpoint / "left_over").touch()
    with torch.no_grad():
        network.lm_head.weight.zero_()
    save_network(network, character_tokenizer(), checkpoint, notes={"note.json": "{}"})
    assert [path.name for path in checkpoint.parent.iterdir()] == ["checkpoint"]
    assert not (checkpoint / "left_over").exists()
    assert (checkpoint / "note.json").read_text() == "{}"
    assert not load_network(checkpoint).lm_head.weight.any()


@pytest.mark.parametrize("slip", [{"top_p": 0.6}, {"do_sample": True, "num_return_sequences": 3}])
def test_a_generation_config_that_contradicts_itself_is_mended_and_not_met_at_the_first_save(
    checkpoint: Path, tmp_path: Path, slip: dict[str, object]
) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, **slip}))
    loaded = load_network(checkpoint)
    save_network(loaded, load_tokenizer(checkpoint), tmp_path / "again")
    assert load_network(tmp_path / "again").generation_config.eos_token_id == 1


def test_a_save_that_fails_leaves_the_old_checkpoint(network: Network, checkpoint: Path) -> None:
    class Broken:
        def save_pretrained(self, _directory: Path) -> None:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_network(network, Broken(), checkpoint)
    assert [path.name for path in checkpoint.parent.iterdir()] == ["checkpoint"]
    load_network(checkpoint)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    assert "no directory" in refusal(tmp_path / "absent")
    assert "config.json" in refusal(tmp_path)
    (checkpoint / "config.json").write_text("{")
    assert "cannot be read" in refusal(checkpoint)


def test_an_adapter_is_refused_for_now(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "LoRA" in refusal(tmp_path)


def test_pickled_weights_are_refused_unread(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert "holds no safetensors" in refusal(checkpoint)
    (checkpoint / "pytorch_model.bin").write_bytes(b"never unpickled")
    assert "pickled" in refusal(checkpoint)


def test_a_missing_shard_or_tokenizer_is_named(checkpoint: Path) -> None:
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00002-of-00002.safetensors"}}))
    assert "model-00002-of-00002.safetensors" in refusal(checkpoint)
    index.unlink()
    for path in checkpoint.glob("tokenizer*"):
        path.unlink()
    assert "tokenizer" in refusal(checkpoint)


def test_a_vocabulary_mismatch_is_told_before_anything_is_loaded(checkpoint: Path) -> None:
    edit(checkpoint / "config.json", vocab_size=60)
    with pytest.raises(InvalidRequest, match="ids up to 100, the embedding has 60 rows"):
        check_model_directory(checkpoint)


def test_missing_weights_are_refused_and_not_made_up(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in refusal(checkpoint)


def test_weights_of_another_shape_are_refused(checkpoint: Path) -> None:
    edit(checkpoint / "config.json", intermediate_size=50)
    assert "cannot be loaded" in refusal(checkpoint)


def test_characters_survive_the_tokenizer_and_the_template_marks_turns(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    text = "Spell: sun -> nus\n  two  spaces, {braces} <tags>."
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|user|>a<|assistant|>b<|end|><|assistant|>"
    assert len(tokenizer.encode(rendered, add_special_tokens=False)) == 6
    assert tokenizer.encode("é", add_special_tokens=False) == [tokenizer.unk_token_id]
