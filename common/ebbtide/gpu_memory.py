"""Lists the GPUs that programs may use, and reads the free memory of GPUs through NVML, and that of the host."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from msgspec import Struct

from ebbtide.errors import InvalidRequest

#: Names the devices that CUDA shows a program, and in which order.
VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
_ORDER: Final = "CUDA_DEVICE_ORDER"
_BY_BUS: Final = "PCI_BUS_ID"
_SLURM_NONE: Final = "NoDevFiles"
#: A folder for each GPU, made by the kernel's driver.
_DRIVER: Final = Path("/proc/driver/nvidia/gpus")

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


class GpuDevice(Struct, frozen=True, kw_only=True):
    """A GPU, or one MIG instance of it."""

    index: int  # the GPU's number in NVML and nvidia-smi
    uuid: str  # "GPU-..." or "MIG-..."
    name: str
    total_bytes: int
    free_bytes: int  # whatever uses the rest

    @property
    def is_mig(self) -> bool:
        return self.uuid.startswith("MIG-")


def visible_devices(environ: Mapping[str, str] = os.environ, driver: Path = _DRIVER) -> tuple[GpuDevice, ...]:
    """List the devices that programs with this environment may use, in CUDA's order; none without a working driver.

    A GPU in MIG mode is listed as its instances, each of which can be one program's. Raises `InvalidRequest` if the
    environment names other devices than NVML, or if GPUs are there and NVML's Python module is not.
    """
    wanted = environ.get(VISIBLE_DEVICES)
    if wanted is not None and wanted.strip() in {"", _SLURM_NONE}:
        return ()
    try:
        import pynvml
    except ImportError:
        if driver.is_dir() and any(driver.iterdir()):
            text = "the GPUs of this host are listed by nvidia-ml-py: install it, or set this to nothing to use none"
            raise InvalidRequest(text, field=VISIBLE_DEVICES) from None
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()  # no driver, or one that CUDA cannot use either
    try:
        listed = tuple(_listed(pynvml))
    except pynvml.NVMLError as error:
        raise InvalidRequest(f"the GPUs of this host cannot be read: {error}", field=VISIBLE_DEVICES) from None
    if wanted is None:
        return listed
    words = [word.strip() for word in wanted.split(",")]
    numbered = [word for word in words if word.lstrip("-").isdigit()]
    if numbered and environ.get(_ORDER) != _BY_BUS and len({device.name for device in listed}) > 1:
        text = f"where GPUs differ, CUDA numbers them otherwise than nvidia-smi: set {_ORDER}={_BY_BUS}, or name UUIDs"
        raise InvalidRequest(text, field=VISIBLE_DEVICES)
    end = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))  # as CUDA reads it
    return named_devices(listed, words[:end], field=VISIBLE_DEVICES)


def named_devices(devices: Sequence[GpuDevice], words: Sequence[str], *, field: str) -> tuple[GpuDevice, ...]:
    """Return the devices that `words` name: by number, or by the beginning of a UUID. A number of a GPU in MIG mode
    stands for its first instance. Raises `InvalidRequest` for none, several, or the same twice."""
    found: list[GpuDevice] = []
    for word in words:
        if word.isdigit():
            named = [device for device in devices if device.index == int(word)][:1]
        else:
            named = [device for device in devices if len(word) > len("GPU-") and device.uuid.startswith(word)]
        if len(named) != 1 or named[0] in found:
            there = ", ".join(device.uuid if device.is_mig else str(device.index) for device in devices) or "none"
            what = "several GPUs" if len(named) > 1 else "a GPU twice" if named else "no GPU that is visible"
            raise InvalidRequest(f"{word!r} names {what}; there are {there}", field=field)
        found += named
    return tuple(found)


def _listed(nvml: Any) -> Iterator[GpuDevice]:
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        instances = list(_instances(nvml, handle))
        for one in instances or [handle]:
            memory = nvml.nvmlDeviceGetMemoryInfo(one)
            yield GpuDevice(
                index=index,
                uuid=str(nvml.nvmlDeviceGetUUID(one)),
                name=str(nvml.nvmlDeviceGetName(one)),
                total_bytes=int(memory.total),
                free_bytes=int(memory.free),
            )


def _instances(nvml: Any, handle: Any) -> Iterator[Any]:
    """The MIG instances of a GPU; none if it has no such mode, or it is off."""
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return
    except nvml.NVMLError:
        return
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError:
            continue  # numbers may have gaps


def container_memory(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that are left of this container's limit (cgroup v2 or v1); what its file cache would give back counts as
    left. More than any machine has where there is no limit."""
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most = int((root / limit).read_text())
            stat = dict(line.split() for line in (root / limit).with_name("memory.stat").read_text().splitlines())
            return most - int((root / used).read_text()) + int(stat.get(cached, 0))
        except (OSError, ValueError):
            continue
    return 1 << 62


def host_memory(path: Path = Path("/proc/meminfo")) -> tuple[int, int]:
    """Available bytes of the host's memory, and all bytes."""
    found = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    available, total = (int(found[name].split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))
    return available, total
