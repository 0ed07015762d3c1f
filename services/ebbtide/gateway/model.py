"""Knows one model folder: its tokenizer, its chat template, the parsers of its responses, and its limits."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import msgspec
from msgspec import Meta, Struct

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.decode import Detokenizer, PieceDecoders
from ebbtide.gateway.parsers import OutputParsers, ParserNames, load_output_parsers
from ebbtide.gateway.templates import TemplateSandbox
from ebbtide.weights import end_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


#: Variables of every template, which options of a request cannot replace.
_RESERVED: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
#: How tokenizers write a space within a token.
_SPACES: Final = ("\u2581", "\u0120")
#: Text behind which other text gets no space, and with which little of it merges.
_NEUTRAL: Final = "\n"
Count = Annotated[int, Meta(ge=0)]


class TextConfig(Struct, frozen=True, kw_only=True):
    """Of config.json, what concerns text. None or 0: it does not say."""

    max_position_embeddings: Count | None = None
    vocab_size: Count | None = None


class _ModelConfig(TextConfig, frozen=True, kw_only=True):
    text_config: TextConfig | None = None  # of models for more than text


class ServedModel:
    """The text side of one model.

    Any thread may call it. `render` waits for another process, and `encode` of a long text takes a while without
    holding the interpreter: call both in a thread of their own. The rest is quick.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        eos_ids: Sequence[int],
        sandbox: TemplateSandbox,
        context: int,
        rows: int = 0,
        parsers: OutputParsers | None = None,
        parses_tools: bool = False,
    ) -> None:
        """`tokenizer`: of `transformers`. `context`: most tokens of prompt and response together. `rows`: of the
        model's embedding; 0: unknown. `parses_tools`: whether `parsers` find calls. Raises `InvalidRequest` naming
        `model` if the tokenizer has no fast implementation.
        """
        self.tokenizer = tokenizer
        #: Ids that end a response, as the model's files name them. May be empty.
        self.eos_ids = tuple(eos_ids)
        self.context, self.parses_tools = context, parses_tools
        self.parsers = parsers  # None: all text is content
        self._fast = fast_tokenizer(tokenizer)
        #: Token ids are below it: the tokenizer's, and those of further rows of the embedding.
        self.vocabulary = max(max(self._fast.get_vocab(with_added_tokens=True).values(), default=-1) + 1, rows)
        self._special = {
            name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)
        }
        self._sandbox = sandbox
        self._decoders = PieceDecoders(self._fast)
        self._added = self._fast.get_added_tokens_decoder()
        self._prepends = self._puts_space()

    @classmethod
    def load(cls, folder: Path, sandbox: TemplateSandbox, names: ParserNames, *, max_model_len: int = 0) -> Self:
        """Reads a model folder, for a second or more. `max_model_len` 0: the model's own. Raises `InvalidRequest`
        naming `model`.
        """
        tokenizer = load_tokenizer_files(folder)
        try:
            ends = set(end_tokens(folder))
        except OSError as error:
            raise InvalidRequest(f"{str(folder)!r} cannot be read: {error}", field="model") from error
        if tokenizer.eos_token_id is not None:
            ends.add(int(tokenizer.eos_token_id))
        config = read_model_config(folder)
        return cls(
            tokenizer,
            eos_ids=sorted(ends),
            sandbox=sandbox,
            context=context_of(config, max_model_len),
            rows=config.vocab_size or 0,
            parsers=load_output_parsers(tokenizer, names),
            parses_tools=bool(names.tool),
        )

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        template_options: dict[str, Any],
        generate: bool = True,
    ) -> str:
        """Returns what the model's chat template makes of `messages`, with a response's opening if `generate`.

        `template_options` are further variables of the template. Raises `InvalidRequest` naming `messages`,
        `chat_template_kwargs` or `model`; `NoCapacity` and `Unavailable` as `TemplateSandbox.render`.
        """
        if taken := sorted(_RESERVED.intersection(template_options)):
            raise InvalidRequest(f"{taken[0]} is a field of its own", field="chat_template_kwargs")
        variables = {
            **self._special,
            **template_options,
            "messages": template_messages(messages),
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": generate,
        }
        return self._sandbox.render(self._template(tools=bool(tools)), variables)

    def _template(self, *, tools: bool) -> str:
        """Jinja, of which a model may have several by name."""
        template = self.tokenizer.chat_template
        if isinstance(template, Mapping):
            template = template.get("tool_use" if tools and "tool_use" in template else "default")
        if not template:
            raise InvalidRequest("the model has no chat template: send its text to /v1/completions", field="messages")
        return str(template)

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
        ids = self.encode("x", special=False)
        first = self._fast.id_to_token(ids[0]) if ids else None
        return first is not None and first.startswith(_SPACES)


def load_tokenizer_files(folder: Path) -> "PreTrainedTokenizerBase":
    """Loads it; without torch where there is a tokenizer.json. Raises `InvalidRequest` naming `model`."""
    try:
        if (folder / "tokenizer.json").exists():
            from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what `tokenizers` raises has no class of its own
        raise InvalidRequest(f"no tokenizer can be loaded from {str(folder)!r}: {error}", field="model") from error
    return tokenizer


def fast_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> "Tokenizer":
    """Returns its implementation in Rust, which any thread may use. It neither truncates nor pads from now on.

    Raises `InvalidRequest` naming `model` for tokenizers in Python, which cannot be decoded piece by piece.
    """
    fast: Any = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None or not hasattr(fast, "encode_batch_fast"):
        raise InvalidRequest(
            f"a {type(tokenizer).__name__} has no tokenizer.json: save it in the format of `tokenizers`", field="model"
        )
    fast.no_truncation()
    fast.no_padding()
    return fast  # type: ignore[no-any-return]


def read_model_config(folder: Path) -> TextConfig:
    """The configuration of the text model. Raises `InvalidRequest` naming `model`."""
    try:
        # Not by msgspec alone: files of Transformers may hold Infinity.
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = msgspec.convert(content, _ModelConfig)
    except (OSError, ValueError, RecursionError, msgspec.ValidationError) as error:
        raise InvalidRequest(f"config.json of {str(folder)!r} cannot be read: {error}", field="model") from error
    return config.text_config if content.get("text_config") and config.text_config else config


def context_of(config: TextConfig, max_model_len: int) -> int:
    """Most tokens of prompt and response together. Raises `InvalidRequest` naming `model` if nothing states it."""
    own = config.max_position_embeddings or 0
    if not own and not max_model_len:
        text = "its config.json states no max_position_embeddings; set --max-model-len"
        raise InvalidRequest(text, field="model")
    return min(own or max_model_len, max_model_len or own)


#: What clients and templates call the reasoning of an answer: some know one name, some the other.
_REASONING: Final = ("reasoning", "reasoning_content")


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages, whose content is text, in the form that chat templates are written for: without empty fields,
    with reasoning under both its names, and with arguments of calls as objects.
    """
    return [_template_message(one) for one in messages]


def _template_message(message: dict[str, Any]) -> dict[str, Any]:
    # Templates take an empty list for calls.
    made = {key: value for key, value in message.items() if value is not None and (key != "tool_calls" or value)}
    made["content"] = message.get("content") or ""
    if (reasoning := reasoning_of(made)) is not None:
        made |= dict.fromkeys(_REASONING, reasoning)
    if "tool_calls" in made:
        made["tool_calls"] = [
            {**call, "function": call["function"] | {"arguments": call_arguments(call["function"].get("arguments"))}}
            for call in made["tool_calls"]
        ]
    return made


def reasoning_of(message: dict[str, Any]) -> Any:
    """Returns a message's reasoning under either of its names, or None."""
    return next((message[name] for name in _REASONING if message.get(name) is not None), None)


def without_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message as clients send it back that keep no reasoning."""
    return {key: value for key, value in message.items() if key not in _REASONING}


def call_arguments(arguments: Any) -> Any:
    """Returns arguments of a call as the JSON value that they are. Text that is no JSON stays text: the model wrote it.

    None and the empty text are no arguments: `{}`.
    """
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
