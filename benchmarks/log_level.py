"""Keeps the logs of services out of a benchmark's output: simulated coordinators log as real ones do."""

from typing import Final

import structlog

_ERROR: Final = 40


def errors_only() -> None:
    """Drops all lines below errors in this process."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(_ERROR))
