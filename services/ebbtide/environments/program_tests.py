"""Runs a program that a policy wrote against tests, each time in a process of its own.

Call it where environment code runs: this bounds time, memory and files, and the sandbox of the process that calls it
bounds the rest. The program gets neither tests nor the word that proves their end before it is loaded, so leaving early
or printing "passed" passes nothing. It shares its process with tests that are written in Python, though, and could
change what these call; tests by input and output are safe from that.
"""

import contextlib
import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

_RUNNER: Final = Path(__file__).with_name("program_runner.py")
_PR_SET_DUMPABLE: Final = 4
_PR_SET_CHILD_SUBREAPER: Final = 36
#: Bytes of a program's output.
_MOST_OUTPUT: Final = 16 << 20
#: Bytes of an answer of the process.
_MOST_ANSWER: Final = 4096
_libc: Final = ctypes.CDLL(None, use_errno=True)


class ProgramLimits(NamedTuple):
    seconds: float  # of the program and all of its tests together
    memory_bytes: int  # address space


class _InputTest(NamedTuple):
    given: str
    wanted: str


def passed_share(program: str, tests: Any, limits: ProgramLimits) -> float:
    """Returns the share of tests that the program passes, from 0 to 1. Raises `ValueError` for tests of another form.

    `tests`: Python code, a list of such, a list of `{"input", "output"}`, or `{"inputs": [...], "outputs": [...]}`.
    """
    pairs, asserts = _parsed(tests)
    deadline = time.monotonic() + limits.seconds
    if asserts:
        return _passed_asserts(program, asserts, limits, deadline) / len(asserts)
    return sum(_passes(program, pair, limits, deadline) for pair in pairs) / len(pairs)


def _parsed(tests: Any) -> tuple[list[_InputTest], list[str]]:
    if isinstance(tests, str):
        tests = [tests]
    if isinstance(tests, dict) and tests.keys() >= {"inputs", "outputs"}:
        tests = [{"input": one, "output": two} for one, two in zip(tests["inputs"], tests["outputs"], strict=True)]
    if isinstance(tests, list) and tests:
        if all(isinstance(one, str) for one in tests):
            return [], tests
        if all(isinstance(one, dict) and one.keys() >= {"input", "output"} for one in tests):
            return [_InputTest(str(one["input"]), str(one["output"])) for one in tests], []
    raise ValueError("the answer holds no tests: give Python code, a list of such, or a list of {input, output}")


def _passed_asserts(program: str, tests: Sequence[str], limits: ProgramLimits, deadline: float) -> int:
    proof = secrets.token_hex(16)
    with open(os.devnull, "r+b") as nothing, _started(limits, nothing, nothing) as (channel, _):  # noqa: PTH123 - both ways
        try:
            _send(channel, {"program": program}, deadline)
            if _receive(channel, deadline) != {"loaded": True}:
                return 0
            _send(channel, {"tests": list(tests), "proof": proof}, deadline)
            answer = _receive(channel, deadline)
        except (OSError, ValueError):  # out of time, ended, or no JSON
            return 0
    if not isinstance(answer, dict) or answer.get("proof") != proof:
        return 0
    passed = answer.get("passed")
    return passed if type(passed) is int and 0 <= passed <= len(tests) else 0


def _passes(program: str, test: _InputTest, limits: ProgramLimits, deadline: float) -> bool:
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
        given.write(test.given.encode())
        given.seek(0)
        with _started(limits, given, printed) as (channel, process):
            try:
                _send(channel, {"script": program}, deadline)
                status = process.wait(max(0.0, deadline - time.monotonic()))
            except (OSError, subprocess.TimeoutExpired):
                return False
        printed.seek(0)
        return not status and _lines(printed.read(_MOST_OUTPUT).decode(errors="replace")) == _lines(test.wanted)


def _lines(text: str) -> list[str]:
    """Lines without white space at their ends, and without empty ones at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


@contextmanager
def _started(
    limits: ProgramLimits, given: IO[bytes], printed: IO[bytes]
) -> Iterator[tuple[socket.socket, "subprocess.Popen[bytes]"]]:
    """Starts a process for one program, and ends it and all that it started."""
    _hide_and_adopt()
    before = _children()
    ours, theirs = socket.socketpair()
    with ours, tempfile.TemporaryDirectory() as folder:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-I", str(_RUNNER), str(theirs.fileno()), json.dumps(limits), str(_MOST_OUTPUT)],
                stdin=given,
                stdout=printed,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": folder, "OMP_NUM_THREADS": "1"},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        try:
            yield ours, process
        finally:
            process.kill()
            process.wait()
            _end_others(before)


def _hide_and_adopt() -> None:
    """Keeps the program, which is of the same user, from reading or changing this process; and makes this the parent
    of what outlives the program."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _children() -> set[int]:
    """This process's children; none where /proc is not mounted."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            found.update(map(int, (task / "children").read_text().split()))
    return found


def _end_others(before: set[int]) -> None:
    """Kills what the program left behind: orphans become children of this process, one generation after the other."""
    while left := _children() - before:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _send(channel: socket.socket, message: Any, deadline: float) -> None:
    channel.settimeout(max(0.001, deadline - time.monotonic()))
    channel.sendall(json.dumps(message).encode() + b"\n")


def _receive(channel: socket.socket, deadline: float) -> Any:
    """Raises `OSError` when it is too late or the process has ended, `ValueError` for what is no JSON."""
    received = b""
    while not received.endswith(b"\n"):
        channel.settimeout(max(0.001, deadline - time.monotonic()))
        if not (part := channel.recv(_MOST_ANSWER)):
            raise ConnectionError
        received += part
        if len(received) > _MOST_ANSWER:
            raise ConnectionError
    return json.loads(received)
