"""Plans a base model and locates it. Without torch, so that an existing one is found at once."""

import json
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from ebbtide.environments import EnvironmentSource

#: Part of the cache key. Raise it when `base_model` makes other models from the same inputs.
RECIPE: Final = 3
#: File beside the weights that records how the model was made. Its presence means that the model is whole.
RECORD: Final = "base_model.json"


@dataclass(frozen=True, kw_only=True)
class BaseModelPlan:
    """Shape, training and target of a base model."""

    layers: int = 4
    hidden_size: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    feed_forward_size: int = 384
    context: int = 512
    batch: int = 32
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    max_steps: int = 800
    #: share of mistyped letters and digits; it bounds the accuracy, so that no check overshoots the target
    error_rate: float = 0.15
    target_accuracy: float = 0.28
    check_every: int = 10
    check_prompts: int = 64


def inputs(source: EnvironmentSource, seed: int, plan: BaseModelPlan) -> dict[str, Any]:
    """Returns all inputs that determine the model."""
    return {"recipe": RECIPE, "source": source.identity, "seed": seed, "plan": asdict(plan)}


def base_model_path(directory: Path, source: EnvironmentSource, seed: int, plan: BaseModelPlan) -> Path:
    """Returns the path below `directory` of the model of these inputs."""
    key = blake2b(json.dumps(inputs(source, seed, plan), sort_keys=True).encode(), digest_size=8).hexdigest()
    return directory / f"base-{key}"


def is_made(path: Path) -> bool:
    return (path / RECORD).exists()
