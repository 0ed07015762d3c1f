"""Keeps the former path of `ebbtide.environments`."""

from ebbtide.environments import (
    Environment,
    EnvironmentSource,
    ExampleSource,
    Message,
    Split,
    StepResult,
    load_source,
    parse_params,
)
from ebbtide.former_paths import warn_moved

__all__ = [
    "Environment",
    "EnvironmentSource",
    "ExampleSource",
    "Message",
    "Split",
    "StepResult",
    "load_source",
    "parse_params",
]

warn_moved(__name__, "ebbtide.environments")
