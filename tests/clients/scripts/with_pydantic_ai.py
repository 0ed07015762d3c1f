"""pydantic-ai: agents over chats, responses and messages; the agent calls the tool by itself."""

import asyncio

from pydantic_ai import Agent
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from told import ASKED, KEY, RUN, answer, base, look, tell, tell_version

MODELS = {"chat": OpenAIChatModel, "response": OpenAIResponsesModel, "message": AnthropicModel}


def agent(what, **more):
    kind = what.partition(" ")[0].rstrip(",")
    if kind == "message":
        provider = AnthropicProvider(base_url=base(what, ""), api_key=KEY)
    else:
        provider = OpenAIProvider(base_url=base(what), api_key=KEY)
    return Agent(MODELS[kind](RUN, provider=provider), **more)


def of(messages):
    return [_answer(one) for one in messages if isinstance(one, ModelResponse)]


def _answer(made):
    text = "".join(part.content for part in made.parts if isinstance(part, TextPart))
    calls = [(part.tool_name, part.args) for part in made.parts if isinstance(part, ToolCallPart)]
    return answer(text, calls, made.usage.input_tokens, made.usage.output_tokens)


async def streamed(what):
    async with agent(what).run_stream(ASKED) as result:
        pieces = [piece async for piece in result.stream_text(delta=True)]
    answers = of(result.new_messages())
    if "".join(pieces) != answers[-1]["text"]:
        raise RuntimeError(f"streamed {''.join(pieces)!r}, in the end {answers[-1]['text']!r}")
    tell(what, answers)


tell_version("pydantic-ai-slim")
for kind in MODELS:
    tell(kind, of(agent(kind).run_sync(ASKED).new_messages()))
    asyncio.run(streamed(f"{kind}, streamed"))
    what = f"{kind} with a tool"
    tell(what, of(agent(what, tools=[look]).run_sync(ASKED).new_messages()))
