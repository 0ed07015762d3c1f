"""verifiers: its client of evaluations over three dialects, and its client of training, which sends tokens."""

import asyncio
import json
import os

from renderers import DefaultRendererConfig
from told import ASKED, DESCRIPTION, KEY, MODEL, PARAMETERS, RUN, URL, answer, look, session, tell, tell_version
from verifiers.v1.clients import resolve_client
from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
from verifiers.v1.dialects import AnthropicDialect, ChatDialect, ResponsesDialect
from verifiers.v1.types import SamplingConfig

SAID = {"role": "user", "content": ASKED}
FUNCTION = {"name": "look", "description": DESCRIPTION, "parameters": PARAMETERS}
ENDPOINT = {"base_url": f"{URL}/v1", "api_key_var": "GATEWAY_KEY"}
DIALECTS = {
    "chat": (ChatDialect(), {"messages": [SAID]}),
    "response": (ResponsesDialect(), {"input": ASKED}),
    "message": (AnthropicDialect(), {"messages": [SAID], "max_tokens": 500}),
}


def of(made):
    calls = [(one.name, one.arguments) for one in made.message.tool_calls or ()]
    return answer(made.message.content, calls, made.usage.input_tokens, made.usage.completion_tokens)


async def relayed(client, what, dialect, body):
    """As a harness gets it: the server's own events."""
    reply = await client.relay(dialect, {"model": RUN, "stream": True, **body}, session(what))
    events = b"".join([chunk async for chunk in reply.chunks]).decode()
    await reply.close()
    found = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    texts = [choice["delta"].get("content") or "" for event in found for choice in event["choices"]]
    tell(what, [answer("".join(texts))])


async def with_a_tool(client, what):
    messages, answers = [SAID], []
    while not answers or answers[-1]["calls"]:
        body = {"model": RUN, "messages": messages, "tools": [{"type": "function", "function": FUNCTION}]}
        made = await client.get_response(ChatDialect(), body, SamplingConfig(), session(what))
        answers.append(of(made))
        messages.append(made.raw["choices"][0]["message"])
        for call in made.message.tool_calls or ():
            content = look(**json.loads(call.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    tell(what, answers)


async def main():
    client = resolve_client(EvalClientConfig(**ENDPOINT))
    for what, (dialect, body) in DIALECTS.items():
        made = await client.get_response(dialect, {"model": RUN, **body}, SamplingConfig(), session(what))
        tell(what, [of(made)])
    await relayed(client, "chat, streamed", *DIALECTS["chat"])
    await with_a_tool(client, "chat with a tool")
    await client.close()

    renderer = DefaultRendererConfig(tool_parser="qwen3")
    client = resolve_client(TrainClientConfig(**ENDPOINT, renderer=renderer, renderer_model_name=str(MODEL)))
    body = {"model": RUN, "messages": [SAID]}
    tell("tokens", [of(await client.get_response(ChatDialect(), body, SamplingConfig(), session("tokens")))])
    await with_a_tool(client, "tokens with a tool")
    await client.close()


tell_version("verifiers")
os.environ["GATEWAY_KEY"] = KEY
asyncio.run(main())
