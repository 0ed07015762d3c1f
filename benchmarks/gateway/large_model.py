"""A model folder as gateways read it, whose tokenizer has as many entries as those of today's models.

The same vocabulary comes out each time: byte-level BPE whose merges are drawn with a fixed seed, and the marks of
ChatML, of reasoning and of tool calls, which vLLM's parsers `qwen3` and `hermes` look for.
"""

import json
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from benchmarks.control_plane.responses import LONGEST
from benchmarks.gateway.stream_plan import ENTRIES, SCRIPT
from tests.fakes.model_texts import CHATML, END, START, THINK, UNTHINK

_CALL, _CALLED = "<tool_call>", "</tool_call>"
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
#: How byte-level tokenizers write a space.
_SPACE: Final = "\u0120"
_LONGEST_WORD: Final = 9


def save_large_model(folder: Path) -> Path:
    """Write tokenizer, template, configuration, and `SCRIPT`."""
    tokenizer = _tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 2 * LONGEST, "vocab_size": ENTRIES}))
    np.save(folder / SCRIPT, _script(tokenizer))
    return folder


def _tokenizer() -> Any:
    random, special = Random(0), (START, END)
    marks = (THINK, UNTHINK, _CALL, _CALLED)
    pieces = {one: number for number, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    grown = [*_LETTERS, _SPACE]
    merges = list[tuple[str, str]]()
    while len(pieces) < ENTRIES - len(special) - len(marks):
        head, letter = random.choice(grown), random.choice(_LETTERS)
        if len(head) < _LONGEST_WORD and head + letter not in pieces:
            merges.append((head, letter))
            pieces[head + letter] = len(pieces)
            grown.append(head + letter)
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in marks])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False)


def _script(tokenizer: Any) -> "np.ndarray[Any, np.dtype[np.int64]]":
    random, entries = Random(1), tokenizer.get_vocab()
    known = sorted(number for entry, number in entries.items() if entry.startswith(_SPACE))

    def words(count: int) -> list[int]:
        return random.choices(known, k=count)

    ids = [entries[THINK], *words(60), entries[UNTHINK], *words(30)]
    while len(ids) < LONGEST:
        head, tail = '{"name": "search", "arguments": {"query": "', '", "days": 3}}'
        call = [*tokenizer.encode(head), *words(60), *tokenizer.encode(tail)]
        ids += [entries[_CALL], *call, entries[_CALLED]]
    return np.array(ids[:LONGEST])
