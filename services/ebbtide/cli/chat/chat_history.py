"""Asks a run's policy in turns, and keeps what was said.

Invariant: the history alternates between the two sides. A turn that fails leaves no trace in it; one that is stopped
leaves what was shown. It is lost with the process.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from msgspec import Struct

from ebbtide.cli.chat.gateway_connection import GatewayConnection

_PATH: Final = "/v1/chat/completions"


class ChatOptions(Struct, frozen=True, kw_only=True):
    """`version` 0: the one that workers have, the newest as soon as it is installed."""

    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    version: int = 0

    def fields(self) -> dict[str, Any]:
        """Fields of each request."""
        given = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return fields | ({"weight_version": {"exact_version": self.version}} if self.version else {})


class AnswerPart(Struct, frozen=True):
    """What is new of an answer. The last part has the versions, and why it ended."""

    text: str = ""
    reasoning: str = ""
    versions: Sequence[int] = ()  # lowest and highest that sampled a token
    finish: str = ""


class ChatHistory:
    """A conversation with one run."""

    def __init__(self, gateway: GatewayConnection, run_id: str, options: ChatOptions) -> None:
        self._gateway, self._run_id, self._options = gateway, run_id, options
        self.messages: list[dict[str, str]] = []
        if options.system:
            self.messages.append({"role": "system", "content": options.system})

    def ask(self, text: str) -> Iterator[AnswerPart]:
        """Parts of the answer as they come. Close the iterator to stop it. Raises what the gateway refuses with."""
        asked = [*self.messages, {"role": "user", "content": text}]
        body = {"model": self._run_id, "messages": asked, "stream": True, **self._options.fields()}
        said = ""
        try:
            for event in self._gateway.events(_PATH, body):
                if part := _part(event):
                    said += part.text
                    yield part
        except (GeneratorExit, KeyboardInterrupt):
            self._keep(asked, said)
            raise
        self._keep(asked, said)

    def _keep(self, asked: list[dict[str, str]], said: str) -> None:
        self.messages = [*asked, {"role": "assistant", "content": said}]


def _part(event: dict[str, Any]) -> AnswerPart | None:
    choices = event.get("choices") or []
    if not choices:
        return None
    delta, finish = choices[0].get("delta") or {}, choices[0].get("finish_reason") or ""
    versions = [event[name] for name in ("weight_version_start", "weight_version_end") if name in event]
    part = AnswerPart(delta.get("content") or "", delta.get("reasoning") or "", tuple(versions), finish)
    return part if part != AnswerPart() else None
