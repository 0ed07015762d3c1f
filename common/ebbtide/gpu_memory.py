"""Reads the free memory of GPUs through NVML, and that of the host."""

import time
from pathlib import Path
from typing import Any, Final, Protocol

from ebbtide.errors import InvalidRequest

#: How long one reading of a device is used: NVML takes up to a millisecond for one.
_FRESH_S: Final = 0.1


class Device(Protocol):
    """A GPU whose memory can be read."""

    def memory(self) -> tuple[int, int]:
        """Free bytes, and all bytes."""
        ...


class NvmlDevice:
    """One GPU, or one MIG instance of it."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._read: tuple[int, int] = (0, 0)
        self._fresh_until = float("-inf")

    def memory(self) -> tuple[int, int]:
        """Free bytes, and all bytes, whatever uses the rest; at most 0.1 s old."""
        now = time.monotonic()
        if now >= self._fresh_until:
            found = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
            self._read, self._fresh_until = (int(found.free), int(found.total)), now + _FRESH_S
        return self._read


def open_device(uuid: str) -> NvmlDevice:
    """Open the device with NVML's id `uuid` ("GPU-..." or "MIG-..."). Raises `InvalidRequest` if it cannot be read."""
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


def host_memory(path: Path = Path("/proc/meminfo")) -> tuple[int, int]:
    """Available bytes of the host's memory, and all bytes."""
    found = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    available, total = (int(found[name].split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))
    return available, total
