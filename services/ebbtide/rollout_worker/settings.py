"""Defines the settings of a rollout-worker."""

import os
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, field

from ebbtide.auth.security import ClientSecurity
from ebbtide.runtime import ProcessSettings
from ebbtide.types.fleet import WorkerKind

_SHARED: Final = {"shared": True}
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - the folder below it is this user's alone, or refused


def shared_folder() -> str:
    """A folder for each user in shared memory; empty where there is none."""
    return str(_SHARED_MEMORY / f"ebbtide-{os.geteuid()}") if _SHARED_MEMORY.is_dir() else ""


class VllmSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the vLLM engine; all others go into `engine_args`."""

    dtype: Annotated[str, Meta(description="auto, float32, bfloat16 or float16")] = "auto"
    tensor_parallel_size: Annotated[int, Meta(ge=1, description="devices that share one model")] = 1
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1, description="share of a device's memory to use")] = 0.9
    max_model_len: Annotated[int, Meta(ge=0, description="prompt plus response, tokens; 0: the model's own")] = 0
    enforce_eager: Annotated[bool, Meta(description="no compilation: boots faster, runs slower")] = False
    kv_cache_mib: Annotated[int, Meta(ge=0, description="memory for keys and values, MiB; 0: by the memory share")] = 0
    threads: Annotated[int, Meta(ge=0, description="OpenMP threads of a CPU engine; 0: as vLLM decides")] = 0
    speculation: Annotated[
        Literal["off", "grouped"], Meta(description="grouped: draft tokens from rollouts' groups, where runs allow it")
    ] = "off"
    speculation_tokens: Annotated[int, Meta(ge=1, le=32, description="tokens of a draft, at most")] = 4
    speculation_mib: Annotated[int, Meta(ge=1, description="memory for groups' tokens to draft from, MiB")] = 512
    engine_args: Annotated[str, Meta(description="further engine arguments of vLLM, a JSON object")] = ""


class WorkerSettings(ProcessSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the worker.

    With two engines on the same cores, spinning OpenMP threads (the default) ruin both. Start the served engine with
    OMP_WAIT_POLICY=PASSIVE; a borrowed one sets it itself, and works best with `vllm.threads` of 1.
    """

    coordinator: Annotated[str, Meta(description="coordinators, comma-separated", extra=_SHARED)] = "127.0.0.1:7600"
    relay: Annotated[str, Meta(description="address of the weight-relay", extra=_SHARED)] = "127.0.0.1:7610"
    client: ClientSecurity = ClientSecurity()
    worker_id: Annotated[str, Meta(description="its name in the fleet; empty: one made up")] = ""
    kind: Annotated[WorkerKind, Meta(description="reserved, spot or borrowed")] = WorkerKind.RESERVED
    site: Annotated[str, Meta(description="cluster or region that it belongs to")] = ""
    engine: Annotated[str, Meta(description="what generates: vllm, or package.module:factory of your own")] = "vllm"
    engine_options: Annotated[str, Meta(description="text for the factory of an engine of your own")] = ""
    model: Annotated[str, Meta(description="checkpoint directory that the engine boots from")] = ""
    change_architecture: Annotated[
        bool, Meta(description="restart the engine for runs of another architecture; never of a borrowed worker")
    ] = True
    change_max_mib: Annotated[int, Meta(ge=0, description="largest weights to restart for, MiB; 0: no limit")] = 0
    grant_dir: Annotated[str, Meta(description="folder shared with the host's serving-guard; if borrowed")] = ""
    step_tokens: Annotated[int, Meta(ge=1, description="most tokens of a borrowed step; a reclaim waits for it")] = 256
    slots: Annotated[int, Meta(ge=1, description="rollouts held at most")] = 32
    admit_by_memory: Annotated[
        bool, Meta(description="rollouts wait until the engine has memory for them, so that it preempts none")
    ] = True
    flush_tokens: Annotated[int, Meta(ge=1, description="unstored tokens of a rollout for which the engine waits")] = 32
    flush_interval_ms: Annotated[int, Meta(ge=1, description="time in which a token is usually stored")] = 250
    drain_timeout_s: Annotated[float, Meta(gt=0, description="longest time to hand everything over at the end")] = 20.0
    notices: Annotated[Literal["none", "aws", "gcp", "azure"], Meta(description="cloud of preemption notices")] = "none"
    metadata_url: Annotated[
        str, Meta(pattern="^https?://[^/]", description="the cloud's metadata server, as http://HOST")
    ] = "http://169.254.169.254"
    pull_patience_s: Annotated[float, Meta(gt=0, description="how long the relay may be away during a pull")] = 30.0
    mirror_dir: Annotated[
        str, Meta(description="folder of weights that the workers of a host share; empty: memory of this worker's own")
    ] = field(default_factory=shared_folder)
    peer_listen: Annotated[str, Meta(description="serve weights to others at host:port (port 0: any); empty: no")] = ""
    peer_advertise: Annotated[str, Meta(description="its address for others (port 0: bound); empty: peer_listen")] = ""
    token_keys: Annotated[str, Meta(description="PEM file of public keys for readers' tokens", extra=_SHARED)] = ""
    peer_readers: Annotated[int, Meta(ge=1, description="other workers served at once, at most")] = 64
    peer_cache_mib: Annotated[int, Meta(ge=1, description="memory for the newest patches to be served, MiB")] = 256
    counter_file: Annotated[str, Meta(description="ledger of generated tokens (ebbtide.ledger); empty: none")] = ""
    vllm: VllmSettings = VllmSettings()
