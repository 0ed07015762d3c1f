"""openai: chats, responses and completions, plain, streamed and with a tool."""

from openai import OpenAI
from told import ASKED, DESCRIPTION, KEY, PARAMETERS, RUN, answer, base, look, tell, tell_version

FUNCTION = {"name": "look", "description": DESCRIPTION, "parameters": PARAMETERS}
SAID = [{"role": "user", "content": ASKED}]


def client(what):
    return OpenAI(base_url=base(what), api_key=KEY, max_retries=0)


def of_chat(made):
    message, usage = made.choices[0].message, made.usage
    calls = [(one.function.name, one.function.arguments) for one in message.tool_calls or ()]
    return answer(message.content, calls, usage.prompt_tokens, usage.completion_tokens)


def of_response(made):
    calls = [(one.name, one.arguments) for one in made.output if one.type == "function_call"]
    return answer(made.output_text, calls, made.usage.input_tokens, made.usage.output_tokens)


tell_version("openai")

tell("chat", [of_chat(client("chat").chat.completions.create(model=RUN, messages=SAID))])

with client("chat, streamed").chat.completions.stream(
    model=RUN, messages=SAID, stream_options={"include_usage": True}
) as stream:
    tell("chat, streamed", [of_chat(stream.get_final_completion())])

for what in ("chat with a tool", "chat with a tool, streamed"):
    messages, answers, tools = list(SAID), [], [{"type": "function", "function": FUNCTION}]
    while not answers or answers[-1]["calls"]:
        if what.endswith("streamed"):
            asked = {"model": RUN, "messages": messages, "tools": tools, "stream_options": {"include_usage": True}}
            with client(what).chat.completions.stream(**asked) as stream:
                made = stream.get_final_completion()
        else:
            made = client(what).chat.completions.create(model=RUN, messages=messages, tools=tools)
        answers.append(of_chat(made))
        messages.append(made.choices[0].message)
        for call, (_, arguments) in zip(made.choices[0].message.tool_calls or (), answers[-1]["calls"], strict=True):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": look(**arguments)})
    tell(what, answers)

tell("response", [of_response(client("response").responses.create(model=RUN, input=ASKED))])

with client("response, streamed").responses.stream(model=RUN, input=ASKED) as stream:
    tell("response, streamed", [of_response(stream.get_final_response())])

what, items, answers = "response with a tool", [{"role": "user", "content": ASKED}], []
while not answers or answers[-1]["calls"]:
    tools = [{"type": "function", "strict": False, **FUNCTION}]
    made = client(what).responses.create(model=RUN, input=items, tools=tools)
    answers.append(of_response(made))
    items += made.output
    for call in made.output:
        if call.type == "function_call":
            output = look(**answers[-1]["calls"][0][1])
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
tell(what, answers)

made = client("completion").completions.create(model=RUN, prompt=ASKED)
tell("completion", [answer(made.choices[0].text, (), made.usage.prompt_tokens, made.usage.completion_tokens)])

chunks = list(client("completion, streamed").completions.create(model=RUN, prompt=ASKED, stream=True))
tell("completion, streamed", [answer("".join(chunk.choices[0].text for chunk in chunks))])
