"""Joins what is known of one model folder: tokenizer and template, parsers of responses, and the model's limits."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.text.detokenizer import Detokenizer
from ebbtide.gateway.text.model_text import ModelText
from ebbtide.gateway.text.output_parsers import OutputParser, OutputParsers, ParserNames, load_output_parsers
from ebbtide.gateway.text.template_sandbox import TemplateSandbox

Count = Annotated[int, Meta(ge=0)]


class TextConfig(Struct, frozen=True, kw_only=True):
    """Of config.json, what concerns text. None or 0: it does not say."""

    max_position_embeddings: Count | None = None
    vocab_size: Count | None = None


class _ModelConfig(TextConfig, frozen=True, kw_only=True):
    text_config: TextConfig | None = None  # of models for more than text


class ServedModel:
    """A `TextModel`."""

    def __init__(self, text: ModelText, parsers: OutputParsers, *, parses_tools: bool, context: int, rows: int) -> None:
        """`rows`: of the model's embedding; 0: unknown."""
        self.text, self._parsers = text, parsers
        self.parses_tools, self.context = parses_tools, context
        self.vocabulary = max(text.vocabulary, rows)
        self.eos_ids = text.eos_ids

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        template_options: dict[str, Any],
        generate: bool = True,
    ) -> str:
        return self.text.render(messages, tools=tools, template_options=template_options, generate=generate)

    def encode(self, text: str, *, special: bool) -> list[int]:
        return self.text.encode(text, special=special)

    def detokenizer(
        self, prompt_ids: Sequence[int], *, skip_special: bool, hidden_ends: Collection[int] | None = None
    ) -> Detokenizer:
        return self.text.detokenizer(prompt_ids, skip_special=skip_special, hidden_ends=hidden_ends)

    def token_text(self, token_id: int) -> str:
        return self.text.token_text(token_id)

    def parser(
        self,
        *,
        tools: list[dict[str, Any]] | None,
        tool_choice: str,
        template_options: dict[str, Any],
        prompt_ids: Sequence[int],
        call_seed: str,
    ) -> OutputParser:
        return self._parsers.parser(
            tools=tools,
            tool_choice=tool_choice,
            template_options=template_options,
            prompt_ids=prompt_ids,
            call_seed=call_seed,
        )


def load_served_model(folder: Path, sandbox: TemplateSandbox, names: ParserNames, *, max_model_len: int) -> ServedModel:
    """Takes a second or more. `max_model_len` 0: the model's own. Raises `InvalidRequest` naming `model`."""
    text = ModelText.load(folder, sandbox)
    config = read_model_config(folder)
    return ServedModel(
        text,
        load_output_parsers(text, names),
        parses_tools=bool(names.tool),
        context=context_of(config, max_model_len),
        rows=config.vocab_size or 0,
    )


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
