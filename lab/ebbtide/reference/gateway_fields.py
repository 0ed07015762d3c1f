"""The page about the fields of the gateway's requests, from the tables that check them."""

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
_HEAD: Final = """\
What a [gateway](../guides/agents-and-gateway.md) does with each field of a request's body, by route and by the
objects inside of bodies. A field is *supported*; or accepted with the values shown, which change nothing of what is
generated; or *refused* with status 400, its name and the reason. Fields that are not listed are refused, too. A null
counts as a field that is left out."""


def page(tables: Sequence[RouteFields] = TABLES) -> Iterator[str]:
    """The lines of docs/reference/gateway-fields.md, with a section for each table."""
    yield "# Gateway fields"
    yield ""
    yield from _HEAD.splitlines()
    for table in tables:
        yield ""
        yield from _section(table)


def _section(table: RouteFields) -> Iterator[str]:
    yield f"## {table.route}"
    yield ""
    yield "| field | support | meaning, or why not |"
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
