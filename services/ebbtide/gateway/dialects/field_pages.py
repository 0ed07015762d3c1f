"""Writes the tables of fields as Markdown, for docs/gateway.md: `python -m ebbtide.gateway.dialects.field_pages`."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from ebbtide.gateway.dialects.anthropic import BLOCK_FIELDS, MESSAGES_FIELDS
from ebbtide.gateway.dialects.chat import CHAT_FIELDS, MESSAGE_FIELDS
from ebbtide.gateway.dialects.completions import COMPLETION_FIELDS
from ebbtide.gateway.dialects.fields import (
    AGENT_TOOL_FIELDS,
    ANY,
    PART_FIELDS,
    STREAM_OPTION_FIELDS,
    TOOL_FUNCTION_FIELDS,
    FieldRule,
    RouteFields,
)
from ebbtide.gateway.dialects.responses import ITEM_FIELDS, NAMESPACE_FIELDS, RESPONSES_FIELDS
from ebbtide.gateway.dialects.sglang import SGLANG_FIELDS, SGLANG_SAMPLING_FIELDS
from ebbtide.gateway.dialects.token_generate import GENERATE_FIELDS, TOKEN_SAMPLING_FIELDS
from ebbtide.gateway.dialects.tokenize import TOKENIZE_FIELDS

#: All tables, routes before the objects inside their bodies.
TABLES: Final[Sequence[RouteFields]] = (
    COMPLETION_FIELDS,
    CHAT_FIELDS,
    STREAM_OPTION_FIELDS,
    MESSAGE_FIELDS,
    PART_FIELDS,
    TOOL_FUNCTION_FIELDS,
    GENERATE_FIELDS,
    TOKEN_SAMPLING_FIELDS,
    SGLANG_FIELDS,
    SGLANG_SAMPLING_FIELDS,
    TOKENIZE_FIELDS,
    RESPONSES_FIELDS,
    ITEM_FIELDS,
    MESSAGES_FIELDS,
    BLOCK_FIELDS,
    AGENT_TOOL_FIELDS,
    NAMESPACE_FIELDS,
)
_ORDER: Final = {"supported": 0, "neutral": 1, "refused": 2}


def field_tables(tables: Sequence[RouteFields] = TABLES) -> str:
    """A section for each table."""
    return "\n\n".join("\n".join(_section(table)) for table in tables) + "\n"


def _section(table: RouteFields) -> Iterator[str]:
    yield f"### {table.route}"
    yield ""
    yield "| field | | |"
    yield "|---|---|---|"
    for name, rule in sorted(table.rules.items(), key=lambda item: (_ORDER[item[1].support], item[0])):
        yield f"| `{name}` | {_support(rule)} | {rule.note.replace('|', '/')} |"


def _support(rule: FieldRule) -> str:
    if rule.support != "neutral":
        return rule.support
    if rule.neutral == ANY:
        return "changes nothing"
    return f"only {' or '.join(f'`{_shown(value)}`' for value in rule.neutral)}"


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()


if __name__ == "__main__":
    sys.stdout.write(field_tables())
