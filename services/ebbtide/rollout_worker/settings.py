"""Settings of a rollout-worker."""

from typing import Annotated

from msgspec import Meta, Struct


class VllmSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the engine; what is not here goes into `engine_args`."""

    dtype: Annotated[str, Meta(description="auto, float32, bfloat16 or float16")] = "auto"
    tensor_parallel_size: Annotated[int, Meta(ge=1, description="devices that share one model")] = 1
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1, description="share of a device's memory to use")] = 0.9
    max_model_len: Annotated[int, Meta(ge=0, description="prompt plus response, tokens; 0: the model's own")] = 0
    enforce_eager: Annotated[
        bool, Meta(description="no compilation, no captured graphs: boots faster, runs slower")
    ] = False
    kv_cache_mib: Annotated[int, Meta(ge=0, description="memory for keys and values, MiB; 0: by the memory share")] = 0
    threads: Annotated[int, Meta(ge=0, description="OpenMP threads of a CPU engine; 0: as vLLM decides")] = 0
    engine_args: Annotated[str, Meta(description="further engine arguments of vLLM, a JSON object")] = ""
