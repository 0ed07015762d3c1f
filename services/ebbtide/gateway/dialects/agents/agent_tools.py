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
#: A search in a provider's cache, which Codex offers by default. That is not here, and no model is told of it.
_CACHED_SEARCH: Final = {"type": "web_search", "external_web_access": False}

#: Most characters of a namespace's name.
_NAME_CHARACTERS: Final = 128


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


def read_response_tools(tools: Sequence[Any], *, most: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The functions of /v1/responses, and by their names the namespaces of those that have one.

    Raises `InvalidRequest` naming the tool, and before it reads any for more than `most`.
    """
    if (count := sum(len(_inner(tool)) if _is_namespace(tool) else 1 for tool in tools)) > most:
        raise InvalidRequest(f"has {count} functions; this gateway takes at most {most}", field="tools")
    made, namespaces = list[dict[str, Any]](), dict[str, str]()
    for number, tool in enumerate(tools):
        field = f"tools[{number}]"
        if tool == _CACHED_SEARCH and tool["external_web_access"] is False:  # 0 is no bool, and equals it
            continue
        if not _is_namespace(tool):
            made.append(_read_tool(tool, ("function",), field))
            continue
        name = _namespace_name(NAMESPACE_FIELDS.checked(tool, inside=field), field)
        functions = read_agent_tools(_inner(tool), ("function",), inside=f"{field}.tools")
        namespaces |= {one["function"]["name"]: name for one in functions}
        made += functions
    names = Counter(one["function"]["name"] for one in made)
    if twice := next((one for one in namespaces if names[one] > 1), None):
        raise InvalidRequest(f"{twice[:100]!r} is the name of several functions; models call them by it", field="tools")
    return made, namespaces


def _is_namespace(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "namespace"


def _inner(namespace: dict[str, Any]) -> list[Any]:
    """Its list of functions, or none if it has no such list."""
    tools = namespace.get("tools")
    return tools if isinstance(tools, list) else []


def _namespace_name(checked: dict[str, Any], field: str) -> str:
    """Its name, which each event of a call repeats."""
    name = checked.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= _NAME_CHARACTERS:
        raise InvalidRequest(f"must be a string of 1 to {_NAME_CHARACTERS} characters", field=f"{field}.name")
    if not isinstance(checked.get("tools"), list):
        raise InvalidRequest("must be a list of functions", field=f"{field}.tools")
    return name
