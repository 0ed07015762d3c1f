"""langchain-openai: chats and responses, plain, streamed and with a tool."""

from functools import reduce
from operator import add

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from told import ASKED, KEY, RUN, answer, base, look, tell, tell_version


def model(what, **more):
    more["use_responses_api"] = what.startswith("response")
    return ChatOpenAI(model=RUN, base_url=base(what), api_key=KEY, max_retries=0, **more)


def of(made):
    usage = made.usage_metadata
    calls = [(one["name"], one["args"]) for one in made.tool_calls]
    return answer(str(made.text), calls, usage["input_tokens"], usage["output_tokens"])


tell_version("langchain-openai")
for kind in ("chat", "response"):
    tell(kind, [of(model(kind).invoke(ASKED))])

    what = f"{kind}, streamed"
    tell(what, [of(reduce(add, model(what, stream_usage=True).stream(ASKED)))])

    what, messages, answers = f"{kind} with a tool", [HumanMessage(ASKED)], []
    while not answers or answers[-1]["calls"]:
        made = model(what).bind_tools([tool(look)]).invoke(messages)
        answers.append(of(made))
        messages.append(made)
        messages += [ToolMessage(look(**one["args"]), tool_call_id=one["id"]) for one in made.tool_calls]
    tell(what, answers)
