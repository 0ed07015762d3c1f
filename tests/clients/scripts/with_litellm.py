"""litellm: its routes to servers of OpenAI's and of Anthropic's API."""

import litellm
from told import ASKED, DESCRIPTION, KEY, PARAMETERS, RUN, answer, base, look, tell, tell_version

SAID = {"role": "user", "content": ASKED}
TOOLS = [{"type": "function", "function": {"name": "look", "description": DESCRIPTION, "parameters": PARAMETERS}}]


def ask(what, **more):
    kind = "anthropic" if what.startswith("message") else "openai"
    url = base(what, "" if kind == "anthropic" else "/v1")
    return litellm.completion(model=f"{kind}/{RUN}", api_base=url, api_key=KEY, num_retries=0, **more)


def of(made):
    message, usage = made.choices[0].message, made.usage
    calls = [(one.function.name, one.function.arguments) for one in message.tool_calls or ()]
    return answer(message.content, calls, usage.prompt_tokens, usage.completion_tokens)


tell_version("litellm")

for kind in ("chat", "message"):
    tell(kind, [of(ask(kind, messages=[SAID]))])

    what = f"{kind}, streamed"
    chunks = list(ask(what, messages=[SAID], stream=True, stream_options={"include_usage": True}))
    tell(what, [of(litellm.stream_chunk_builder(chunks, messages=[SAID]))])

    what, messages, answers = f"{kind} with a tool", [SAID], []
    while not answers or answers[-1]["calls"]:
        made = ask(what, messages=messages, tools=TOOLS)
        answers.append(of(made))
        messages.append(made.choices[0].message)
        for call, (_, arguments) in zip(made.choices[0].message.tool_calls or (), answers[-1]["calls"], strict=True):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": look(**arguments)})
    tell(what, answers)
