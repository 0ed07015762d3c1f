"""Makes a character tokenizer for networks too small for words: printable ASCII, newline, and chat markers."""

import string
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN, END, USER, ASSISTANT = "<|pad|>", "<|unknown|>", "<|end|>", "<|user|>", "<|assistant|>"
SPECIAL = (PAD, UNKNOWN, END, USER, ASSISTANT)
CHARACTERS = "\n" + "".join(sorted(string.ascii_letters + string.digits + string.punctuation + " "))
#: A turn is its marker and its text; an end token, which the policy samples itself, closes an assistant's turn. Calls
#: of tools are written as vLLM's parser `pythonic` reads them. The tools of a request are not described: a network this
#: small knows its own.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|assistant|>' if message.role == 'assistant' else '<|user|>' }}{{ message.content }}"
    "{% if message.tool_calls %}[{% for call in message.tool_calls %}{{ call.function.name }}("
    "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value | tojson }}"
    "{{ '' if loop.last else ', ' }}{% endfor %}){{ '' if loop.last else ', ' }}{% endfor %}]{% endif %}"
    "{{ '<|end|>' if message.role == 'assistant' else '' }}"
    "{% endfor %}{{ '<|assistant|>' if add_generation_prompt else '' }}"
)


def character_tokenizer() -> Any:
    """Makes a fast tokenizer with a token per character, which `AutoTokenizer` loads; others become unknown."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
