"""A network of which every probability is known: the next token depends on the last one alone.

It is a Qwen3 that engines load as any other. Its embeddings are one-hot and its layer adds nothing, so its head is a
table of logits. Where the chat template offers tools, the table writes a call of `look`; else a character of which each
token is one byte, then words of several tokens, and now and then that character again. No such answer is empty.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from tests.fakes.model_texts import END, byte_level_tokenizer

#: The token behind which a call is written. The template puts it there where a user speaks and tools are offered.
CALL: Final = "<|call|>"
#: A call in the format that vLLM's parser `hermes` reads; each is one token, and the name looked at is drawn.
_BEFORE_NAME: Final = ("<tool_call>", '{"name": "', "look", '", "arguments": {"at": "')
NAMES: Final = ("toma", "biko", "dune")
_BEHIND_NAME: Final = ('"}}', "</tool_call>")
#: A character whose bytes are tokens of their own.
_BYTEWISE: Final = "🎉"
TEMPLATE: Final = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '<|call|>' if m.tool_calls }}{{ m.content or '' }}"
    '{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}'
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ '<|call|>' if tools and messages[-1].role != 'tool' }}{% endif %}"
)
#: The ends of prompts that an answer follows: of a chat, and of the question that completions are asked.
_OPENINGS: Final = ("<|im_start|>assistant\n", "?")
#: As wide as the head is long: each token has a dimension of its own.
_WIDTH: Final = 512
_EPSILON: Final = 1e-6
_NEVER: Final = -30.0


def save_bigram_model(folder: Path, *, context: int = 32_768) -> Path:
    """Write the model, and `bigrams.npy`: the logprob of each token (column) behind each other one (row)."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    tokenizer = bigram_tokenizer()
    logits = bigram_logits(tokenizer)
    shifted = logits - logits.max(axis=1, keepdims=True)
    config = Qwen3Config(
        vocab_size=_WIDTH,
        hidden_size=_WIDTH,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=context,
        rms_norm_eps=_EPSILON,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.token_to_id(END),
        bos_token_id=None,
        pad_token_id=None,
    )
    model: Any = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(_WIDTH))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        # The last norm makes of a one-hot vector one that is so long.
        length = (1 / _WIDTH + _EPSILON) ** -0.5
        model.lm_head.weight.copy_(torch.from_numpy(logits.T / length))
    model.save_pretrained(folder)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False)
    whole.chat_template = TEMPLATE
    whole.save_pretrained(folder)
    np.save(folder / "bigrams.npy", shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
    return folder


def bigram_tokenizer() -> Tokenizer:
    """Byte-level BPE, with the parts of a call as tokens."""
    tokenizer = Tokenizer.from_str(byte_level_tokenizer().backend_tokenizer.to_str())
    tokenizer.add_special_tokens([CALL])
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in (*_BEFORE_NAME, *NAMES, *_BEHIND_NAME)])
    return tokenizer


def bigram_logits(tokenizer: Tokenizer) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """A row for each token: what follows it."""
    random = np.random.default_rng(7)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    end, words, character = ids[END], _words(ids), _bytes_of(ids, _BYTEWISE)
    table = np.full((_WIDTH, _WIDTH), _NEVER, np.float32)
    table[:, words] = np.clip(random.normal(size=(_WIDTH, len(words))), -2, 2)
    table[words, end], table[:, character[0]] = 3.0, 2.5
    # The likeliest token behind each, so that greedy texts end: the next word, and behind every sixth the end.
    for number, word in enumerate(words):
        table[word, end if number % 6 == 5 else words[(number + 1) % len(words)]] = 4.0
    for opening in _OPENINGS:
        _chain(table, [tokenizer.encode(opening).ids[-1], character[0]])
    _chain(table, character)
    _chain(table, [ids[one] for one in (CALL, *_BEFORE_NAME)])
    table[ids[_BEFORE_NAME[-1]]] = _NEVER
    for name, logit in zip(NAMES, (2.0, 1.0, 0.0), strict=True):
        table[ids[_BEFORE_NAME[-1]], ids[name]] = logit
        _chain(table, [ids[name], *(ids[one] for one in _BEHIND_NAME), end])
    return table


def _chain(table: "np.ndarray[Any, np.dtype[np.float32]]", ids: list[int]) -> None:
    """Let each of these tokens be followed by the next one, whatever happens."""
    for one, following in pairwise(ids):
        table[one] = _NEVER
        table[one, following] = 0.0


def _words(ids: dict[str, int]) -> list[int]:
    """Tokens of a space and letters: however they are joined, they are a text."""
    return sorted(one for token, one in ids.items() if token[0] == "Ġ" and token[1:].isalpha() and token[1:].isascii())


def _bytes_of(ids: dict[str, int], text: str) -> list[int]:
    """The ids of its bytes, one by one."""
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((characters, _),) = alphabet.pre_tokenize_str(text)
    return [ids[one] for one in characters]
