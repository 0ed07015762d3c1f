"""Has chat templates rendered by a few processes that cannot outlive their limits.

A process is started when it is first needed, and again after a rendering has ended it. Whatever a template, a message
or a tool's schema does, it costs at most the limits of one rendering, and never the gateway's event loop.

Invariant: a process is used by one thread at a time. What is lost with the gateway: nothing; its processes end with
their connections, or in a rendering by its time limit.
"""

import contextlib
import hashlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
from typing import Any, Final

import msgspec

from ebbtide.errors import InvalidRequest, Unavailable
from ebbtide.gateway.text.template_frames import TemplateJob, TemplateText, receive, send
from ebbtide.gateway.text.template_process import TemplateLimits

#: Processor time runs slower than the clock on a busy host; a process that is silent for this long does not run at all.
_SILENCE_S: Final = 30.0


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
        self._connection: socket.socket | None = None
        self._known: set[str] = set()

    def render(self, template: str, variables: str) -> TemplateText:
        key = hashlib.blake2b(template.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it ended while idle
        connection = self._connection or self._start()
        try:
            send(connection, TemplateJob(key, "" if key in self._known else template, variables))
            made = receive(connection, TemplateText)
            if made.unknown:  # it keeps a bounded number
                send(connection, TemplateJob(key, template, variables))
                made = receive(connection, TemplateText)
        except ValueError:
            return TemplateText(error="they are too large")
        except (OSError, EOFError):
            return self._lost()
        if not made.broken:
            self._known.add(key)
        return made

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        arguments = [sys.executable, "-I", "-m", "ebbtide.gateway.text.template_process"]
        with theirs:
            self._process = subprocess.Popen(
                [*arguments, msgspec.json.encode(self._limits).decode()],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={name: os.environ[name] for name in ("TZ", "LANG", "LC_ALL") if name in os.environ},
            )
        ours.settimeout(_SILENCE_S)
        self._connection = ours
        return ours

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
