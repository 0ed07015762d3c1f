"""How close logprobs of real engines must be, on a CPU build and on a GPU."""

from typing import Final

from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker.engine.vllm.cpu_build import is_cpu_build

#: On a GPU: the relative error of bf16 is 2^-9, and attention in float32 multiplies in TF32, with 2^-11; a logprob of a
#: few units is off by some hundredths at most.
ON_GPUS: Final = 0.03


def within(on_cpus: float) -> float:
    """The tolerance for engines here: `on_cpus`, where float32 is exact, or what GPUs round."""
    try:
        return on_cpus if is_cpu_build() else max(on_cpus, ON_GPUS)
    except InvalidRequest:  # there is no vLLM, and so no engine
        return on_cpus
