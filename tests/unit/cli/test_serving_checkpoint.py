"""The model that is served in the demo: a checkpoint that others load."""

from pathlib import Path

from ebbtide.local_cluster.serving_checkpoint import ServedNetwork, served_model

SMALL = ServedNetwork(hidden=64, layers=2, heads=2, kv_heads=1, head=32, feed_forward=96, vocabulary=128, context=256)


def test_transformers_loads_it_whole_and_it_computes(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path = served_model(tmp_path, SMALL)
    network, report = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, output_loading_info=True)
    assert not any(report.values())
    assert network.dtype == torch.bfloat16
    logits = network(torch.arange(3, 50)[None]).logits
    assert torch.isfinite(logits).all()
    assert logits.std() > 0


def test_its_tokenizer_has_a_token_for_each_character_and_a_template_for_chats(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(served_model(tmp_path, SMALL), local_files_only=True)
    text = "Spell it\nbackward, {please}!"
    assert len(tokenizer.encode(text)) == len(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "?"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|user|>hi<|assistant|>ho<|user|>?<|assistant|>"
    assert len(tokenizer.encode(rendered)) == len("hiho?") + 4


def test_the_same_seed_gives_the_same_bytes_and_what_is_there_is_kept(tmp_path: Path) -> None:
    weights = "model.safetensors"
    one, again, other = (
        served_model(tmp_path / folder, SMALL, seed) for folder, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert (one / weights).read_bytes() == (again / weights).read_bytes() != (other / weights).read_bytes()
    made = (one / weights).stat().st_mtime_ns
    assert served_model(tmp_path / "a", SMALL, 1) == one
    assert (one / weights).stat().st_mtime_ns == made
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [one.name]
