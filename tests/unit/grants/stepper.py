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
            time.sleep(STEP_S)
            page.end_step(budget.tokens)
