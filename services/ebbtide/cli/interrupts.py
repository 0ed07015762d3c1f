"""Handles Ctrl-C of commands that start processes: the first ends them in order, the second kills them at once."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import psutil

from ebbtide.errors import InvalidRequest

INTERRUPTED: Final = 130
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Returns the exit status of `main`. SIGINT, SIGTERM and SIGHUP cancel it; the status is 130 then."""
    return asyncio.run(_run(main))


def run_demo_command(main: Callable[[], Coroutine[Any, Any, int]], logs: Path) -> int:
    """Runs a demo likewise, and names its logs if it ends without a report."""
    try:
        status = run(main)
    except InvalidRequest:
        raise
    except Exception:
        print(f"The demo failed; all its processes are gone. Logs: {logs}", file=sys.stderr)  # noqa: T201
        raise
    if status == INTERRUPTED:
        print(f"Interrupted; all processes are gone. Logs: {logs}", file=sys.stderr)  # noqa: T201
    return status


async def _run(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    task = asyncio.create_task(main())
    asked = False

    def on_signal() -> None:
        nonlocal asked
        if asked:
            _end_at_once()
        asked = True
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        return await task
    except asyncio.CancelledError:
        if not asked:
            raise
        return INTERRUPTED


def _end_at_once() -> None:
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(INTERRUPTED)
