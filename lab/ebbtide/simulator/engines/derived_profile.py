"""Derives the profile that a scenario names by model and GPUs: `h100x2-qwen3-14b` is Qwen3-14B on two H100."""

import re
from typing import Annotated, Final

from msgspec import Meta, Struct

from ebbtide.checked_files.record_check import suggestion
from ebbtide.errors import InvalidRequest
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.engines.known_hardware import GPUS, MODELS
from ebbtide.simulator.engines.roofline import (
    DeviceSheet,
    ModelShape,
    kv_room,
    profile_name,
    roofline_engine,
    roofline_trainer,
)
from ebbtide.simulator.engines.trainer_profile import TrainerProfile

#: The roofline's exchange between GPUs is that of one host.
_MOST_TP: Final = 8
_NAME: Final = re.compile(r"(?P<gpu>[a-z0-9]+)x(?P<gpus>[1-9]\d{0,4})-(?P<model>.+)")
_GPUS: Final = {gpu.name.lower(): gpu for gpu in GPUS}
_MODELS: Final = {model.name.lower(): model for model in MODELS}


class EngineOn(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine as a scenario may state it. Its text is the profile's name."""

    model: str
    gpu: str
    tp: Annotated[int, Meta(ge=1, le=_MOST_TP)] = 1  # GPUs of one host that share each layer (tensor parallelism)

    def __str__(self) -> str:
        return profile_name(self.model, self.gpu, self.tp)


class TrainerOn(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trainer as a scenario may state it. Its text is the profile's name."""

    model: str
    gpu: str
    gpus: Annotated[int, Meta(ge=1, le=99_999)]

    def __str__(self) -> str:
        return profile_name(self.model, self.gpu, self.gpus)


def derived_engine(name: str) -> EngineProfile:
    """The profile of a name such as `h100x2-qwen3-14b`. Raises `InvalidRequest` if it is unknown or has no room."""
    model, gpu, gpus = _parts(name)
    if gpus > _MOST_TP:
        raise InvalidRequest(f"has {gpus} GPUs; an engine has at most {_MOST_TP}, those of a host", field=name)
    if kv_room(model, gpu, gpus) < model.kv_bytes:
        told = f"{model.name}'s {model.bytes / 1e9:.0f} GB leave no memory for keys and values on {gpus} {gpu.name}"
        raise InvalidRequest(f"{told}; take more GPUs, or a profile of your own", field=name)
    return roofline_engine(model, gpu, gpus)


def derived_trainer(name: str) -> TrainerProfile:
    """The profile of a name such as `h100x8-qwen3-14b`. Raises `InvalidRequest` for what is not known."""
    return roofline_trainer(*_parts(name))


def _parts(name: str) -> tuple[ModelShape, DeviceSheet, int]:
    found = _NAME.fullmatch(name.lower())
    if found is None:
        form = "GPU, x, number of GPUs, - and model, as in h100x2-qwen3-14b"
        raise InvalidRequest(f"names no profile; write {form}, or a path that ends with .toml", field=name)
    gpu, model = found["gpu"], found["model"]
    if gpu not in _GPUS:
        raise InvalidRequest(f"no GPU is called {gpu!r}{suggestion(gpu, list(_GPUS))}", field=name)
    if model not in _MODELS:
        raise InvalidRequest(f"no model is called {model!r}{suggestion(model, list(_MODELS))}", field=name)
    return _MODELS[model], _GPUS[gpu], int(found["gpus"])
