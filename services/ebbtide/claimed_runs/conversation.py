"""Turns messages into tokens and back. Sampled tokens are never decoded and encoded again.

The chat template renders the opening of an episode as a whole. For later turns it renders the new messages after a
stand-in for the response, and only the text after the stand-in is encoded. That text (the end of the assistant's turn,
the new messages, the next turn's header) counts as the environment's: no loss falls on it.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ebbtide.claimed_runs.model_directory import check_model_directory
from ebbtide.environments import Message
from ebbtide.errors import InvalidRequest
from ebbtide.weights import end_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: All samples of a group have the same opening, so it is rendered and encoded once.
_OPENINGS: Final = 64
#: Stands for a response while a template is rendered; no template contains it.
_RESPONSE: Final = "\u27e6the response\u27e7"


class Conversations:
    """Converts the messages of one run by the tokenizer's chat template, or as raw text if it has none."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, context: int, end_ids: frozenset[int]) -> None:
        """`context`: most tokens of prompt and response together; 0: unknown. `end_ids` end a response."""
        self._tokenizer = tokenizer
        self._templated = bool(tokenizer.chat_template)
        self.context = context
        self.end_ids = end_ids
        self._openings = lru_cache(_OPENINGS)(self._opening)

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Returns token ids of the first prompt. Raises `InvalidRequest` if it has no token, or too many."""
        return list(self._openings(tuple(messages)))

    def _opening(self, messages: Sequence[Message]) -> list[int]:
        if self._templated:
            ids = self._encode(self._render(messages), special=False)
        else:
            ids = self._encode("".join(message.content for message in messages), special=True)
        if not ids:
            raise InvalidRequest("the opening messages hold no token", field="environment")
        if self.context and len(ids) >= self.context:
            raise InvalidRequest(
                f"a prompt of {len(ids)} tokens leaves no room in the model's context of {self.context}; "
                "ask for less in environment.params, or take a model with a longer context",
                field="environment",
            )
        return ids

    def following(self, opening: Sequence[Message], response: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Returns the token ids of `messages` between `response` (ids as sampled) and the next one."""
        if not self._templated:
            return self._encode("".join(message.content for message in messages), special=False)
        text = self._render([*opening, Message("assistant", _RESPONSE), *messages])
        if _RESPONSE not in text:
            raise InvalidRequest("the chat template leaves out the assistant's turns: one turn only", field="model")
        ids = self._encode(text.rpartition(_RESPONSE)[2], special=False)
        # The template closes the assistant's turn; if the policy closed it itself, that token exists already.
        return ids[1:] if ids and response and response[-1] == ids[0] else ids

    def text(self, response: Sequence[int]) -> str:
        """Returns the response as text, without its end token."""
        ids = list(response[:-1] if response and response[-1] in self.end_ids else response)
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def raw_text(self, ids: Sequence[int]) -> str:
        """Returns tokens as text, special ones included."""
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def _render(self, messages: Sequence[Message]) -> str:
        from jinja2 import TemplateError

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [message.as_dict() for message in messages], add_generation_prompt=True, tokenize=False
                )
            )
        except TemplateError as error:
            message = f"its chat template refuses the environment's messages: {error}"
            raise InvalidRequest(message, field="model") from None

    def _encode(self, text: str, *, special: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special))


def load_conversations(model: str, *, stop_token_ids: Sequence[int] = ()) -> Conversations:
    """Loads the tokenizer of the checkpoint directory `model`. Raises `InvalidRequest` naming `model`."""
    folder = Path(model)
    check_model_directory(folder)
    tokenizer = _load_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text_config = config.get("text_config", config)
    ends = (tokenizer.eos_token_id, *stop_token_ids, *end_tokens(folder))
    return Conversations(
        tokenizer,
        context=int(text_config.get("max_position_embeddings") or 0),
        end_ids=frozenset(int(end) for end in ends if end is not None),
    )


def _load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Loads it without torch if there is a tokenizer.json: that takes 1 s and 65 MiB, not 4 s and 400 MiB."""
    try:
        if (folder / "tokenizer.json").exists():
            from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InvalidRequest(f"no tokenizer can be loaded from {str(folder)!r}: {error}", field="model") from error
