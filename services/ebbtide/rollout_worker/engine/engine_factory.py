"""Loads the factory of an engine that is not Ebbtide's own, by its path."""

import importlib
from collections.abc import Callable
from pathlib import Path

from ebbtide.errors import InvalidRequest
from ebbtide.grants import Page
from ebbtide.rollout_worker.engine import Engine
from ebbtide.rollout_worker.settings import WorkerSettings

#: Makes an engine that is not started yet. `Path`: the checkpoint that it restarts with; None: the worker's own.
#: `Page`: of grants, for a borrowed engine, which computes only as they allow.
EngineFactory = Callable[[WorkerSettings, Path | None, Page | None], Engine]


def load_factory(path: str) -> EngineFactory:
    """Imports `package.module:factory`. Raises `InvalidRequest` naming the field."""
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise InvalidRequest(f"{path!r} is no engine; give vllm, or package.module:factory", field="engine")
    try:
        factory: EngineFactory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        text = f"{path} cannot be imported ({error}); install its package, or add its folder to PYTHONPATH"
        raise InvalidRequest(text, field="engine") from error
    return factory
