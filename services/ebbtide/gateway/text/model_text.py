"""Turns text and messages into a model's token ids, and its token ids into text."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final, Self

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.text.chat_template import ChatTemplate
from ebbtide.gateway.text.detokenizer import Detokenizer
from ebbtide.gateway.text.piece_decoders import PieceDecoders
from ebbtide.gateway.text.template_sandbox import TemplateSandbox
from ebbtide.gateway.text.tokenizer_files import fast_tokenizer, load_tokenizer_files
from ebbtide.weights import end_tokens

#: How tokenizers write a space within a token.
_SPACES: Final = ("\u2581", "\u0120")
#: Text behind which other text gets no space, and with which little of it merges.
_NEUTRAL: Final = "\n"


class ModelText:
    """The tokenizer and the chat template of one model folder.

    Any thread may call it. `render` waits for another process, and `encode` of a long text takes a while without
    holding the interpreter: call both in a thread of their own. The rest is quick.
    """

    def __init__(self, tokenizer: Any, *, eos_ids: Sequence[int], sandbox: TemplateSandbox) -> None:
        """`tokenizer`: of `transformers`. Raises `InvalidRequest` naming `model` if it has no fast implementation."""
        #: The tokenizer that parsers of responses want.
        self.tokenizer = tokenizer
        #: Ids that end a response, as the model's files name them. May be empty.
        self.eos_ids = tuple(eos_ids)
        self._fast = fast_tokenizer(tokenizer)
        #: Number of ids: the highest that the tokenizer knows, plus one. The model's embedding may have more rows.
        self.vocabulary = max(self._fast.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        self._template = ChatTemplate(tokenizer.chat_template, special, sandbox)
        self._decoders = PieceDecoders(self._fast)
        self._added = self._fast.get_added_tokens_decoder()
        self._prepends = self._puts_space()

    @classmethod
    def load(cls, folder: Path, sandbox: TemplateSandbox) -> Self:
        """Reads a model folder. Raises `InvalidRequest` naming `model`."""
        tokenizer = load_tokenizer_files(folder)
        try:
            ends = set(end_tokens(folder))
        except OSError as error:
            raise InvalidRequest(f"{str(folder)!r} cannot be read: {error}", field="model") from error
        if tokenizer.eos_token_id is not None:
            ends.add(int(tokenizer.eos_token_id))
        return cls(tokenizer, eos_ids=sorted(ends), sandbox=sandbox)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        template_options: dict[str, Any],
        generate: bool = True,
    ) -> str:
        """Returns what the model's chat template makes of `messages`, with a response's opening if `generate`.

        Raises `InvalidRequest` naming `messages`, `chat_template_kwargs` or `model`; `NoCapacity` and `Unavailable` as
        `TemplateSandbox.render`.
        """
        return self._template.render(messages, tools=tools, options=template_options, generate=generate)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Returns the ids of `text`; with `special`, between the tokens that begin and end a text of this model.

        Raises `InvalidRequest` naming `prompt` for text that UTF-8 cannot hold.
        """
        try:
            # A batch, as `encode` would hold the interpreter for as long as it takes.
            (encoded,) = self._fast.encode_batch_fast([text], add_special_tokens=special)
        except (TypeError, UnicodeError):  # half of a surrogate pair
            raise InvalidRequest("is no valid text in Unicode", field="prompt") from None
        return list(encoded.ids)

    def encode_following(self, text: str, after: int) -> list[int]:
        """Returns the ids that `text` has behind the id `after`, as if both had been encoded together.

        They differ from those of `text` alone for tokenizers that put a space before a text.
        """
        if not text or not self._prepends:
            return self.encode(text, special=False)
        before = self._added[after].content if after in self._added else _NEUTRAL
        ids, known = self.encode(before + text, special=False), self.encode(before, special=False)
        # The two merge if `before` takes white space beside it, or begins a longer token: then the text stands alone.
        return ids[len(known) :] if ids[: len(known)] == known else self.encode(text, special=False)

    def detokenizer(
        self, prompt_ids: Sequence[int], *, skip_special: bool, hidden_ends: Collection[int] | None = None
    ) -> Detokenizer:
        """Decodes a response to `prompt_ids`, without special tokens if `skip_special`.

        `hidden_ends`: ids that have no text at the response's very end, by default `eos_ids`.
        """
        pieces = self._decoders.decoder(prompt_ids, skip_special=skip_special)
        return Detokenizer(pieces, hidden_ends=self.eos_ids if hidden_ends is None else hidden_ends)

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Returns the text of `ids`, which begin a text."""
        return self._fast.decode([int(one) for one in ids], skip_special_tokens=skip_special)

    def token_text(self, token_id: int) -> str:
        """Returns the text of one id alone; bytes of an incomplete character are U+FFFD."""
        return self._fast.decode([token_id], skip_special_tokens=False)

    def _puts_space(self) -> bool:
        """Whether a text gets a space that it does not have, as in Llama 2's tokenizer."""
        first = self._fast.id_to_token(self.encode("x", special=False)[0]) if self.vocabulary else None
        return first is not None and first.startswith(_SPACES)
