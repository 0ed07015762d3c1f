"""inspect-ai: evaluations by its providers for OpenAI's and Anthropic's APIs, plain and with a tool."""

import os

import inspect_ai
from inspect_ai.dataset import Sample
from inspect_ai.event import ModelEvent
from inspect_ai.model import get_model
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool
from told import ASKED, KEY, RUN, answer, base, look, tell, tell_version


@tool(name="look")
def looking():
    async def execute(at: str) -> str:
        """Tells what is known of a name.

        Args:
            at: The name.
        """
        return look(at)

    return execute


def of(event):
    message, usage = event.output.message, event.output.usage
    calls = [(one.function, one.arguments) for one in message.tool_calls or ()]
    return answer(message.text, calls, usage.input_tokens, usage.output_tokens)


MODELS = {"chat": f"openai-api/ebbtide/{RUN}", "response": f"openai/{RUN}", "message": f"anthropic/{RUN}"}
MORE = {"chat": {}, "response": {"responses_api": True}, "message": {}}

tell_version("inspect-ai")
os.environ["EBBTIDE_API_KEY"] = KEY
for kind, name in MODELS.items():
    for what, solver in ((kind, [generate()]), (f"{kind} with a tool", [use_tools(looking()), generate()])):
        url = base(what, "" if kind == "message" else "/v1")
        model = get_model(name, base_url=url, api_key=KEY, memoize=False, **MORE[kind])
        task = inspect_ai.Task(dataset=[Sample(input=ASKED)], solver=solver)
        (log,) = inspect_ai.eval(task, model=model, display="none", max_retries=0)
        if log.status != "success":
            raise RuntimeError(f"{what}: error {log.error.message if log.error else log.status}")
        answers = [of(event) for event in log.samples[0].events if isinstance(event, ModelEvent)]
        tell(what, answers, own=int(kind == "response"))  # it asks first whether the server has responses
