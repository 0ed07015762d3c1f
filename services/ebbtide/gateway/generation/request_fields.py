"""Names the fields of a client's request: in its own errors, and where the coordinator refuses a rollout of it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.generation.text_request import ChatPrompt, TextRequest

#: A field of a rollout, as the coordinator names it.
_ROLLOUT_FIELD: Final = re.compile(r"rollouts\[(?P<number>\d+)\]\.(?:sampling\.)?(?P<name>\w+)")


def prompt_field(request: TextRequest, number: int) -> str:
    """The field that holds a prompt."""
    if isinstance(request.prompts[number], ChatPrompt):
        return "messages"
    return "prompt" if len(request.prompts) == 1 else f"prompt[{number}]"


@contextmanager
def named_as_asked(request: TextRequest) -> Iterator[None]:
    """Have what the coordinator refuses of a rollout name the client's field instead."""
    try:
        yield
    except InvalidRequest as error:
        text = str(error).removeprefix(f"{error.field}: ")
        match = _ROLLOUT_FIELD.fullmatch(error.field)
        if match is None:
            raise
        prompt = prompt_field(request, int(match["number"]) // request.n)
        raise InvalidRequest(text, field=prompt if match["name"] == "prompt_ids" else match["name"]) from None
