"""Runs a module in a process of its own, which real engines are forked from, and reads what it found out."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from ebbtide.local_cluster.launcher import tethered

Facts = dict[str, Any]
ROOT = Path(__file__).parents[2]


def facts_of(module: str, *arguments: object, told: object = None, within_s: float = 280.0) -> Facts:
    """The last line, as JSON, that `tests.e2e.MODULE` prints; `told` is its stdin. It dies with this process, and with
    it its engines."""
    command = tethered(sys.executable, "-m", f"tests.e2e.{module}", *map(str, arguments))
    done = subprocess.run(
        command, input=json.dumps(told), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=within_s
    )
    facts: Facts = json.loads(done.stdout.splitlines()[-1])
    return facts
