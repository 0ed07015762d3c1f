"""openai-agents: agents over responses (its default) and chats, plain, streamed and with a tool."""

import asyncio

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI
from told import ASKED, KEY, RUN, answer, base, look, tell, tell_version

MODELS = {"response": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}


def agent(what, **more):
    client = AsyncOpenAI(base_url=base(what), api_key=KEY, max_retries=0)
    kind = what.partition(" ")[0].rstrip(",")
    return Agent(name="Assistant", instructions="Be kind.", model=MODELS[kind](RUN, client), **more)


def of(result):
    return [_answer(one) for one in result.raw_responses]


def _answer(made):
    messages = [one for one in made.output if one.type == "message"]
    text = "".join(part.text for one in messages for part in one.content)
    calls = [(one.name, one.arguments) for one in made.output if one.type == "function_call"]
    # Streamed chats state no usage unless they are asked to, and by default it does not ask.
    return answer(text, calls, made.usage.input_tokens or None, made.usage.output_tokens or None)


async def main():
    for kind in MODELS:
        tell(kind, of(await Runner.run(agent(kind), ASKED)))
        for what, tools in ((f"{kind}, streamed", []), (f"{kind} with a tool, streamed", [function_tool(look)])):
            result = Runner.run_streamed(agent(what, tools=tools), ASKED)
            async for _ in result.stream_events():
                pass
            tell(what, of(result))
        what = f"{kind} with a tool"
        tell(what, of(await Runner.run(agent(what, tools=[function_tool(look)]), ASKED)))


tell_version("openai-agents")
asyncio.run(main())
