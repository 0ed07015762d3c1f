"""Renders chat templates in a process of its own: `python -m ebbtide.gateway.text.template_process LIMITS`.

Jinja's immutable sandbox keeps a template from the process's objects. It bounds neither time nor memory, so the kernel
does: an interval timer of processor time ends the process in the middle of any loop, and its address space is limited.

Invariant: the process holds compiled templates and nothing else. It has none of the gateway's memory, open files and
environment variables.
"""

import json
import resource
import signal
import socket
import sys
from datetime import datetime
from typing import Any, Final, NoReturn

import msgspec
from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ebbtide.gateway.text.template_frames import TemplateJob, TemplateText, receive, send

#: Compiled templates that a process keeps: more than the models of one gateway.
_TEMPLATES: Final = 64


class TemplateLimits(msgspec.Struct):
    """What one rendering may use."""

    cpu_s: float = 2.0
    """Processor time. Templates of models need milliseconds."""
    text_chars: int = 16 << 20
    """Characters of the prompt."""
    memory_bytes: int = 1 << 30
    """Address space of the process."""


class _TooLong(Exception):
    """The prompt exceeds its limit."""


class _Generation(Extension):
    """Knows `{% generation %}`, which marks the assistant's text for trainers that render whole conversations."""

    tags = {"generation"}  # noqa: RUF012  # Jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_environment() -> ImmutableSandboxedEnvironment:
    """Makes the environment that chat templates are written for, by the conventions of Hugging Face's tokenizers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def main() -> NoReturn:
    limits = msgspec.json.decode(sys.argv[1], type=TemplateLimits)
    connection = socket.socket(fileno=0)
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the gateway, which then closes the connection
    renderer = _Renderer(limits)
    while True:
        try:
            job = receive(connection, TemplateJob)
        except (EOFError, OSError):
            sys.exit(0)
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)  # nobody handles SIGPROF: the kernel ends the process
        made = renderer.render(job) if renderer.knows(job) else TemplateText(unknown=True)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(connection, made)


class _Renderer:
    """Compiles templates once and renders them."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._environment = template_environment()
        self._compiled: dict[str, Template] = {}

    def knows(self, job: TemplateJob) -> bool:
        return bool(job.template) or job.key in self._compiled

    def render(self, job: TemplateJob) -> TemplateText:
        try:
            template = self._template(job)
        except (TemplateSyntaxError, RecursionError, MemoryError) as error:
            return TemplateText(error=f"it does not compile: {_told(error)}", broken=True)
        try:
            text = self._text(template, job.variables)
            text.encode()  # a half of a surrogate pair cannot be sent
            return TemplateText(text=text)
        except _TooLong:
            return TemplateText(error=f"it makes more than {self._limits.text_chars} characters of them")
        except MemoryError:
            return TemplateText(error="it needs too much memory for them")
        except RecursionError:
            return TemplateText(error="they are nested too deeply")
        except Exception as error:  # noqa: BLE001  # a template can raise anything by what it calls
            return TemplateText(error=_told(error))

    def _template(self, job: TemplateJob) -> Template:
        if (found := self._compiled.get(job.key)) is None:
            while len(self._compiled) >= _TEMPLATES:
                del self._compiled[next(iter(self._compiled))]
            found = self._compiled[job.key] = self._environment.from_string(job.template)
        return found

    def _text(self, template: Template, variables: str) -> str:
        pieces, length = [], 0
        for piece in template.generate(json.loads(variables)):
            pieces.append(piece)
            length += len(piece)
            if length > self._limits.text_chars:
                raise _TooLong
        return "".join(pieces)


def _told(error: BaseException) -> str:
    return f"{error}"[:500] or type(error).__name__


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


if __name__ == "__main__":
    main()
