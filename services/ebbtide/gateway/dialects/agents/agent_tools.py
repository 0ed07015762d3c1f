"""Reads tools as the routes of agents name them.

A namespace is a list of functions: models call them by their own names, and an answer says which namespace each is of.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.dialects.openai.chat_messages import tool_function
from ebbtide.gateway.fields.agent_fields import AGENT_TOOL_FIELDS, NAMESPACE_FIELDS

_RENAMED: Final = {"input_schema": "parameters"}
#: A search that reaches nothing, which Codex offers by default: there is none here, too, and no model is told of it.
_NO_SEARCH: Final = {"type": "web_search", "external_web_access": False}


def read_agent_tools(
    tools: Sequence[Any], kinds: Sequence[str | None], *, inside: str = "tools"
) -> list[dict[str, Any]]:
    """The functions among tools of `kinds`, as chat templates take them. Raises `InvalidRequest` naming the tool."""
    return [_read_tool(tool, kinds, f"{inside}[{number}]") for number, tool in enumerate(tools)]


def _read_tool(tool: Any, kinds: Sequence[str | None], field: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise InvalidRequest("must be an object", field=field)
    if tool.get("type") not in kinds:
        raise InvalidRequest(
            f"{str(tool.get('type'))[:40]!r} is not supported: only functions that the client runs are tools here",
            field=f"{field}.type",
        )
    checked = AGENT_TOOL_FIELDS.checked(tool, inside=field)
    checked.pop("type", None)
    return tool_function({_RENAMED.get(name, name): value for name, value in checked.items()}, field)


def read_response_tools(tools: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The functions of /v1/responses, and by their names the namespaces of those that have one.

    Raises `InvalidRequest` naming the tool.
    """
    made, namespaces = list[dict[str, Any]](), dict[str, str]()
    for number, tool in enumerate(tools):
        field = f"tools[{number}]"
        if tool == _NO_SEARCH:
            continue
        if not isinstance(tool, dict) or tool.get("type") != "namespace":
            made.append(_read_tool(tool, ("function",), field))
            continue
        checked = NAMESPACE_FIELDS.checked(tool, inside=field)
        name, inner = checked.get("name"), checked.get("tools")
        if not isinstance(name, str) or not isinstance(inner, list):
            raise InvalidRequest("must have a name and a list of tools", field=field)
        functions = read_agent_tools(inner, ("function",), inside=f"{field}.tools")
        namespaces |= {one["function"]["name"]: name for one in functions}
        made += functions
    names = Counter(one["function"]["name"] for one in made)
    if twice := next((one for one in namespaces if names[one] > 1), None):
        raise InvalidRequest(f"{twice[:100]!r} is the name of several functions; models call them by it", field="tools")
    return made, namespaces
