"""Stands for NVML, at the edge of the product: a module `pynvml` that lists imitated GPUs."""

import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace

import msgspec
import pytest

H100 = "NVIDIA H100 80GB HBM3"
GB = 10**9


class ImitatedGpu(msgspec.Struct, frozen=True, kw_only=True):
    uuid: str
    name: str = H100
    total: int = 80 * GB
    used: int = 0
    instances: tuple["ImitatedGpu", ...] = ()  # of its MIG mode; empty: it is off


class NVMLError(Exception):
    pass


def gpus(count: int, **changes: object) -> list[ImitatedGpu]:
    return [ImitatedGpu(uuid=f"GPU-{index:04d}-imitated", **changes) for index in range(count)]  # type: ignore[arg-type]


def nvml(those: Sequence[ImitatedGpu], *, driver: bool = True) -> ModuleType:
    """The module. Without a `driver` it cannot be initialised, as on a machine without GPUs."""

    def init() -> None:
        if not driver:
            raise NVMLError("NVML Shared Library Not Found")

    def instance(gpu: ImitatedGpu, number: int) -> ImitatedGpu:
        if number >= len(gpu.instances):
            raise NVMLError("Not Found")
        return gpu.instances[number]

    module = ModuleType("pynvml")
    module.__dict__.update(
        NVMLError=NVMLError,
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlInit=init,
        nvmlDeviceGetCount=lambda: len(those),
        nvmlDeviceGetHandleByIndex=lambda index: those[index],
        nvmlDeviceGetUUID=lambda gpu: gpu.uuid,
        nvmlDeviceGetName=lambda gpu: gpu.name,
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(total=gpu.total, free=gpu.total - gpu.used),
        nvmlDeviceGetMigMode=lambda gpu: (int(bool(gpu.instances)), 0),
        nvmlDeviceGetMaxMigDeviceCount=lambda _: 7,
        nvmlDeviceGetMigDeviceHandleByIndex=instance,
    )
    return module


def imitate(monkeypatch: pytest.MonkeyPatch, those: Sequence[ImitatedGpu], visible: str | None = None) -> None:
    """Makes this process see such GPUs, and builds of PyTorch and vLLM that use them."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml(those))
    for name in ("torch_on_gpus", "vllm_on_gpus"):
        for module in ("ebbtide.local_cluster.local_cluster", "ebbtide.cli.up"):
            monkeypatch.setattr(f"{module}.{name}", lambda: True)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
