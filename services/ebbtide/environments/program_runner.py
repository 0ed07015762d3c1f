"""Runs one program under limits: `python -I program_runner.py SOCKET LIMITS MOST_OUTPUT`, by `program_tests`.

It imports nothing but the standard library, and nothing of Ebbtide: what it runs may read and change all of it.
"""

import json
import os
import resource
import socket
import sys
from typing import Any


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1])).makefile("rwb")
    seconds, memory_bytes = json.loads(sys.argv[2])
    _limit(seconds, memory_bytes, int(sys.argv[3]))
    first = json.loads(channel.readline())
    if "script" in first:
        channel.close()
        exec(compile(first["script"], "<program>", "exec"), {"__name__": "__main__"})  # noqa: S102 - its purpose
        return
    space: dict[str, Any] = {"__name__": "program"}
    exec(compile(first["program"], "<program>", "exec"), space)  # noqa: S102 - its purpose
    _say(channel, {"loaded": True})
    second = json.loads(channel.readline())
    passed = sum(_passes(test, space) for test in second["tests"])
    _say(channel, {"proof": second["proof"], "passed": passed})


def _limit(seconds: float, memory_bytes: int, most_output: int) -> None:
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_FSIZE: most_output,
        resource.RLIMIT_CORE: 0,
    }
    for kind, wanted in limits.items():
        _, hard = resource.getrlimit(kind)
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (limit, limit))


def _passes(test: str, space: dict[str, Any]) -> bool:
    try:
        exec(compile(test, "<test>", "exec"), space)  # noqa: S102 - its purpose
    except BaseException:  # noqa: BLE001 - of the program
        return False
    return True


def _say(channel: Any, message: dict[str, Any]) -> None:
    channel.write(json.dumps(message).encode() + b"\n")
    channel.flush()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # without the program's own exit handlers and threads
