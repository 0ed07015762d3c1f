"""A GPU's memory, by NVML: how much of it is free, whoever uses the rest."""

import time
from typing import Any, Final, Protocol

from ebbtide.errors import InvalidRequest

#: A reading serves for so long: NVML takes up to a millisecond for one.
_FRESH_S: Final = 0.1


class GpuDevice(Protocol):
    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and all of them."""
        ...


class NvmlDevice:
    """One GPU, or one MIG instance of it."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._read: tuple[int, int] = (0, 0)
        self._fresh_until = float("-inf")

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and all of them; at most 0.1 s old."""
        now = time.monotonic()
        if now >= self._fresh_until:
            found = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
            self._read, self._fresh_until = (int(found.free), int(found.total)), now + _FRESH_S
        return self._read


def open_device(uuid: str) -> NvmlDevice:
    """The device with NVML's id `uuid` ("GPU-..." or "MIG-..."). Raises `InvalidRequest` if it cannot be read."""
    try:
        import pynvml
    except ImportError:
        raise InvalidRequest("needs nvidia-ml-py: install ebbtide[guard]", field="device") from None
    try:
        pynvml.nvmlInit()
        device = NvmlDevice(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
        device.memory()
    except pynvml.NVMLError as error:
        raise InvalidRequest(f"{uuid} cannot be read: {error}", field="device") from None
    return device
