"""Makes the events that all of OpenAI's streams share, and those that follow them."""

from ebbtide.errors import EbbtideError
from ebbtide.gateway.dialects.dialect import AnswerContext
from ebbtide.gateway.dialects.error_shapes import openai_error, status_of
from ebbtide.gateway.dialects.event_lines import DONE, KEEP_ALIVE, data_event


class OpenAIEvents:
    """A part of an `Answer`."""

    def __init__(self, context: AnswerContext) -> None:
        self._context = context

    def failure(self, error: EbbtideError) -> bytes:
        return data_event(openai_error(status_of(error), error, self._context.request_id)) + DONE

    def idle(self) -> bytes:
        return KEEP_ALIVE
