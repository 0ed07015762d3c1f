"""Finds a number for its user, with a tool that knows names. An ordinary program on the `openai` client.

Nothing here knows of training: not of sessions, tokens or rewards. `client` may be of any server.
"""

import json
from collections.abc import Callable
from typing import Any

from openai import AsyncOpenAI

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Tells a name's number, or the name that knows it.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
        },
    }
]


#: A model that goes on looking has to stop somewhere. The way has three answers.
MOST_ANSWERS = 5


async def find_number(client: AsyncOpenAI, model: str, name: str, look: Callable[[str], str]) -> list[Any]:
    """Returns the conversation. Its last message has the number, unless the model went on looking."""
    messages: list[Any] = [{"role": "user", "content": f"find {name}"}]
    for _ in range(MOST_ANSWERS):
        completion = await client.chat.completions.create(model=model, messages=messages, tools=TOOLS, max_tokens=40)
        answer = completion.choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            content = call_tool(call, look)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return messages


def call_tool(call: Any, look: Callable[[str], str]) -> str:
    """Returns what the tool says, or what is wrong with a call."""
    if call.function.name != "look":
        return "no such tool"
    at = json.loads(call.function.arguments).get("at")
    return look(at) if isinstance(at, str) else "look at a name"
