"""Renders chat templates in a few processes that cannot outlive their limits.

A process is started when it is first needed, and again after a rendering has ended it. Jinja's immutable sandbox keeps
a template from the process's objects. It bounds neither time nor memory, so the kernel does: an interval timer of
processor time ends the process in the middle of any loop, and its address space is limited. Whatever a template, a
message or a tool's schema does, it costs at most the limits of one rendering, and never the gateway's event loop.

The process is this module as a program: `python -m ebbtide.gateway.templates LIMITS`. It speaks msgpack, in messages of
`multiprocessing.connection` on its standard input; nothing is pickled.

Invariant: a process is used by one thread at a time. It holds compiled templates and nothing else: it has none of the
gateway's memory, open files and environment variables. What is lost with the gateway: nothing; its processes end with
their connections, or in a rendering by its time limit.
"""

import contextlib
import hashlib
import json
import os
import queue
import resource
import signal
import socket
import struct
import subprocess
import sys
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any, Final, NoReturn

import msgspec
from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ebbtide.errors import InvalidRequest, Unavailable

#: Bytes of one message. The gateway's limit on bodies is far below.
_MAX_MESSAGE: Final = 256 << 20
#: Processor time runs slower than the clock on a busy host; a process that is silent for this long does not run at all.
_SILENCE_S: Final = 30.0
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


class TemplateJob(msgspec.Struct):
    """One rendering. `template` is empty if the process should have the template of that `key`.

    `variables` is a JSON object: it holds integers of any size, which models do write.
    """

    key: str
    template: str
    variables: str


class TemplateText(msgspec.Struct):
    """What came of it: `text`, or `error`, of which `broken` says that the template is to blame, not its variables.
    `unknown`: the process lacks the template.
    """

    text: str = ""
    error: str = ""
    broken: bool = False
    unknown: bool = False


class TemplateSandbox:
    """Renders templates in at most `processes` processes at once. Its methods may be called by any thread."""

    def __init__(self, *, processes: int = 2, limits: TemplateLimits | None = None) -> None:
        self._limits = limits or TemplateLimits()
        self._idle: queue.LifoQueue[_TemplateProcess] = queue.LifoQueue()  # the busiest first: others need not start
        for _ in range(processes):
            self._idle.put(_TemplateProcess(self._limits))
        self._processes = processes

    def render(self, template: str, variables: dict[str, Any]) -> str:
        """Returns what `template` makes of `variables`, which are JSON values. Blocks until it is there.

        Raises `InvalidRequest` naming `messages` if it fails or exceeds a limit, naming `model` if the template does
        not compile; `Unavailable` if no process is free in time, or one ended by itself.
        """
        try:
            packed = json.dumps(variables, ensure_ascii=False)
            packed.encode()
        except (RecursionError, UnicodeError, TypeError, ValueError) as error:
            raise InvalidRequest(f"they cannot be encoded: {type(error).__name__}", field="messages") from None
        try:
            process = self._idle.get(timeout=_SILENCE_S)
        except queue.Empty:
            raise Unavailable("all template processes are busy: try again") from None
        try:
            made = process.render(template, packed)
        finally:
            self._idle.put(process)
        if made.error:
            raise InvalidRequest(
                f"the model's chat template refuses them: {made.error}" if not made.broken else made.error,
                field="model" if made.broken else "messages",
            )
        return made.text

    def close(self) -> None:
        """Ends the processes once they are idle. Rendering afterwards waits in vain."""
        for _ in range(self._processes):
            with contextlib.suppress(queue.Empty):
                self._idle.get(timeout=_SILENCE_S).close()


class _TemplateProcess:
    """One process, which may be gone."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._known: set[str] = set()

    def render(self, template: str, variables: str) -> TemplateText:
        key = hashlib.blake2b(template.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it ended while idle
        connection = self._connection or self._start()
        try:
            made = self._asked(connection, TemplateJob(key, "" if key in self._known else template, variables))
            if made.unknown:  # it keeps a bounded number
                made = self._asked(connection, TemplateJob(key, template, variables))
        except ValueError:
            return TemplateText(error="they are too large")
        except (OSError, EOFError):
            return self._lost()
        if not made.broken:
            self._known.add(key)
        return made

    def _asked(self, connection: Connection, job: TemplateJob) -> TemplateText:
        _send(connection, job)
        return msgspec.msgpack.decode(connection.recv_bytes(_MAX_MESSAGE), type=TemplateText)

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        arguments = [sys.executable, "-I", "-m", "ebbtide.gateway.templates"]
        with theirs:
            self._process = subprocess.Popen(
                [*arguments, msgspec.json.encode(self._limits).decode()],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={name: os.environ[name] for name in ("TZ", "LANG", "LC_ALL") if name in os.environ},
            )
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # also in the middle of a message
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", round(_SILENCE_S), 0))
        self._connection = Connection(ours.detach())
        return self._connection

    def _lost(self) -> TemplateText:
        """Says why the process ended, or ends it because it is silent."""
        status = self.close()
        if status == -signal.SIGPROF:
            return TemplateText(error=f"it needs more than {self._limits.cpu_s:g} s of processor time for them")
        if status == -signal.SIGSEGV:  # the C stack overflowed
            return TemplateText(error="they are nested too deeply")
        raise Unavailable(f"the template process ended with status {status}: try again")

    def close(self) -> int | None:
        """Ends the process if it runs. Returns its status."""
        if self._connection is not None:
            self._connection.close()
        process, self._process, self._connection = self._process, None, None
        self._known.clear()
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=1.0)  # by now it sees its connection closed, or is ended by the kernel
        process.kill()
        return process.wait()


def _send(connection: Connection, message: msgspec.Struct) -> None:
    """Raises `OSError`, and `ValueError` if the message is too large."""
    body = msgspec.msgpack.encode(message)
    if len(body) > _MAX_MESSAGE:
        raise ValueError(f"a message of {len(body)} bytes")
    connection.send_bytes(body)


def main() -> NoReturn:
    limits = msgspec.json.decode(sys.argv[1], type=TemplateLimits)
    connection = Connection(0)
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the gateway, which then closes the connection
    renderer = _Renderer(limits)
    while True:
        try:
            job = msgspec.msgpack.decode(connection.recv_bytes(_MAX_MESSAGE), type=TemplateJob)
        except (EOFError, OSError):
            sys.exit(0)
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)  # nobody handles SIGPROF: the kernel ends the process
        made = renderer.render(job) if renderer.knows(job) else TemplateText(unknown=True)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(connection, made)


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
