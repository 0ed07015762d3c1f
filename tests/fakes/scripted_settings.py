"""Defines what the scripted engine is told, and how a worker is given it."""

from typing import Any, Final

import msgspec
from msgspec import Struct

#: Names the scripted engine to a worker.
ENGINE: Final = "tests.fakes.scripted_engine:make"


class ScriptedSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of the engine that follows a script, for tests and for measurements of everything else."""

    step_s: float = 0.01  # for a token of each rollout, up to the plateau
    plateau: int = 0  # rollouts from which on tokens/s stay flat in all; 0: none
    slowness: float = 1.0  # factor on all times of generation
    burst: int = 1  # tokens of a rollout that leave the engine at once
    first_token_s: float = 0.0  # before the first token of a request
    prefill_token_s: float = 0.0  # so long a token read holds everybody up
    boot_s: float = 0.0
    install_s: float = 0.0  # for which an install holds generation
    model: str = ""  # checkpoint whose tensors versions must have; empty: any tensors
    vocab_size: int = 128  # token ids are below
    max_model_len: int = 4096  # prompt plus response, tokens
    mean_length: int = 0  # one token in so many ends a response (id 1); 0: none
    stall_after_tokens: int = 0  # then nothing comes any more; 0: never
    stall_at_s: float = 0.0  # so long after boot nothing comes for a while; 0: never
    stall_s: float = 0.0  # how long that while is; 0: forever
    fail_after_tokens: int = 0  # then the engine is lost; 0: never
    digests: bool = False  # log a digest of each version's bytes as they are installed
    stubborn: bool = False  # borrowed, it goes on whatever it is granted
    scores: bool = False  # scores prompts, by the script too
    kv_tokens: int = 0  # memory for keys and values, tokens; 0: it does not say
    kv_block: int = 16  # tokens by which that memory is given out
    refuse_version: int = 0  # a version that it refuses to install; 0: none


def write_script(script: ScriptedSettings) -> str:
    """What a worker's `engine_options` say."""
    return msgspec.json.encode(script).decode()


def read_script(engine_options: str) -> ScriptedSettings:
    return msgspec.json.decode(engine_options or "{}", type=ScriptedSettings)


def engine_settings(script: ScriptedSettings) -> dict[str, str]:
    """The settings of a worker whose engine follows this script."""
    return {"engine": ENGINE, "engine_options": write_script(script)}


def engine_flags(script: ScriptedSettings) -> list[str]:
    return ["--engine", ENGINE, "--engine-options", write_script(script)]


def former_settings(script: ScriptedSettings) -> dict[str, Any]:
    """The same for the code of revisions that had the scripted engine among their own."""
    told = {f"scripted_{name}": value for name, value in msgspec.to_builtins(script).items()}
    return {"engine": "scripted", **told}
