"""Runs an engine that only steps, in its own process; its argument is the page's path."""

import os
import sys
import time
from pathlib import Path

from ebbtide.grants import Page

STEP_S = 0.002

if __name__ == "__main__":
    page = Page(Path(sys.argv[1]))
    page.enter(os.getpid(), 0)
    print("up", flush=True)  # noqa: T201 - for the test that started it
    while True:
        if page.await_budget(1.0).tokens and (budget := page.begin_step()).tokens:
            page.report(running=1, waiting=0, kv_used=0, recomputed=0)  # so a test sees that it is in mid-step
            time.sleep(STEP_S)
            page.report(running=0, waiting=0, kv_used=0, recomputed=0)
            page.end_step(budget.tokens)
