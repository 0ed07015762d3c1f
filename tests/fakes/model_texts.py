"""Makes tokenizers as models have them: byte-level BPE, text with byte fallback, and the demos' characters."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from ebbtide.gateway.model import ServedModel
from ebbtide.gateway.parsers import OutputParsers
from ebbtide.gateway.templates import TemplateSandbox
from ebbtide.trainer.base_model.base_model import character_tokenizer

START, END, THINK, UNTHINK = "<|im_start|>", "<|im_end|>", "<think>", "</think>"
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    'He said: {"name": "search", "arguments": {"query": "weather in Zürich", "days": 3}}',
    "system user assistant tool <tool_call> </tool_call> hello Hello world I am here. 1 2 3 42",
    "Ein schöner Tag; 漢字かな交じり文 and emoji 🎉👍🏽 too.\n\nNext paragraph\twith tabs.",
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if tools %}tools: {{ tools | length }}\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: What random texts are drawn from: several bytes long, combined, and special.
ALPHABET = [*'abc ABC,.\n\t{}":0189', "é", "ß", "漢", "字", "🎉", "👍🏽", "  ", "the ", "dog", START, END]


@cache
def byte_level_tokenizer() -> Any:
    """As GPT-2, Qwen and Llama 3 have: BPE over bytes, with ChatML's markers and those of reasoning."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([START, END])
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in (THINK, UNTHINK)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False)


@cache
def fallback_tokenizer() -> Any:
    """As Llama 2 and Mistral have: text with a space before it, and bytes for what it lacks."""
    byte_tokens = [f"<0x{one:02X}>" for one in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.train_from_iterator(
        CORPUS[:3],
        trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", *byte_tokens], show_progress=False),
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    # The trainer makes special tokens of the bytes, but in real models they are ordinary ones.
    plain = Tokenizer.from_str(_without_added(tokenizer.to_str()))
    plain.add_special_tokens(["<unk>", START, END])
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token=END, unk_token="<unk>", clean_up_tokenization_spaces=False
    )


def _without_added(text: str) -> str:
    described = json.loads(text)
    described["added_tokens"] = []
    return json.dumps(described)


def served_model(
    tokenizer: Any,
    sandbox: TemplateSandbox,
    *,
    template: str | None = None,
    context: int = 512,
    rows: int = 0,
    parsers: OutputParsers | None = None,
) -> ServedModel:
    """A model with this tokenizer, and with `template` instead of its own. `parsers`: they find calls."""
    if template is not None:
        tokenizer = _copied(tokenizer)
        tokenizer.chat_template = template
    return ServedModel(
        tokenizer,
        eos_ids=[tokenizer.eos_token_id],
        sandbox=sandbox,
        context=context,
        rows=rows,
        parsers=parsers,
        parses_tools=parsers is not None,
    )


def _copied(tokenizer: Any) -> Any:
    import copy

    return copy.copy(tokenizer)


def save_chat_tokenizer(folder: Path) -> None:
    """A tokenizer of 424 tokens with the template of chats."""
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    tokenizer.chat_template = None


def save_chat_model(folder: Path) -> Path:
    """What a gateway reads of a model: its tokenizer, template and configuration."""
    save_chat_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, "vocab_size": 512}))
    return folder


def tokenizers() -> dict[str, Any]:
    return {
        "byte-level": byte_level_tokenizer(),
        "fallback": fallback_tokenizer(),
        "characters": character_tokenizer(),
    }


def random_text(draw: random.Random, length: int) -> str:
    return "".join(draw.choice(ALPHABET) for _ in range(length))
