"""Reads tools as the routes of agents name them."""

from collections.abc import Sequence
from typing import Any, Final

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.dialects.openai.chat_messages import tool_function
from ebbtide.gateway.fields.agent_fields import AGENT_TOOL_FIELDS

_RENAMED: Final = {"input_schema": "parameters"}


def read_agent_tools(tools: Sequence[Any], kinds: Sequence[str | None]) -> list[dict[str, Any]]:
    """The functions among tools of `kinds`, as chat templates take them. Raises `InvalidRequest` naming the tool."""
    made = []
    for number, tool in enumerate(tools):
        field = f"tools[{number}]"
        if not isinstance(tool, dict):
            raise InvalidRequest("must be an object", field=field)
        if tool.get("type") not in kinds:
            raise InvalidRequest(
                f"{str(tool.get('type'))[:40]!r} is not supported: only functions that the client runs are tools here",
                field=f"{field}.type",
            )
        checked = AGENT_TOOL_FIELDS.checked(tool, inside=field)
        checked.pop("type", None)
        made.append(tool_function({_RENAMED.get(name, name): value for name, value in checked.items()}, field))
    return made
