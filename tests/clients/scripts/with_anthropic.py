"""anthropic: messages, plain, streamed and with a tool; and their tokens counted."""

from anthropic import Anthropic
from told import ASKED, DESCRIPTION, KEY, PARAMETERS, RUN, answer, base, look, tell, tell_version

SAID = {"role": "user", "content": ASKED}
TOOLS = [{"name": "look", "description": DESCRIPTION, "input_schema": PARAMETERS}]
ASKS = {"model": RUN, "max_tokens": 500}


def client(what):
    return Anthropic(base_url=base(what, ""), api_key=KEY, max_retries=0)


def of(made):
    text = "".join(block.text for block in made.content if block.type == "text")
    calls = [(block.name, block.input) for block in made.content if block.type == "tool_use"]
    return answer(text, calls, made.usage.input_tokens, made.usage.output_tokens)


tell_version("anthropic")

made = client("message").messages.create(**ASKS, messages=[SAID])
counted = client("message").messages.count_tokens(model=RUN, messages=[SAID])
if counted.input_tokens != made.usage.input_tokens:
    raise RuntimeError(f"counted {counted.input_tokens} tokens, and {made.usage.input_tokens} were read")
tell("message", [of(made)])

with client("message, streamed").messages.stream(**ASKS, messages=[SAID]) as stream:
    text = "".join(stream.text_stream)
    final = of(stream.get_final_message())
    if text != final["text"]:
        raise RuntimeError(f"streamed {text!r}, in the end {final['text']!r}")
tell("message, streamed", [final])

for what in ("message with a tool", "message with a tool, streamed"):
    messages, answers = [SAID], []
    while not answers or answers[-1]["calls"]:
        if what.endswith("streamed"):
            with client(what).messages.stream(**ASKS, messages=messages, tools=TOOLS) as stream:
                made = stream.get_final_message()
        else:
            made = client(what).messages.create(**ASKS, messages=messages, tools=TOOLS)
        answers.append(of(made))
        messages.append({"role": "assistant", "content": made.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": look(**block.input)}
            for block in made.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    tell(what, answers)
