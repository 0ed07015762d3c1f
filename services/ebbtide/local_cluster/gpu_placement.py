"""Decides which GPUs each program of a cluster on this machine sees, and what share of a GPU where several meet on one.

Training processes get the first GPUs, one each, and engines the next ones, as many as their tensor parallelism takes.
Where GPUs are too few, engines on one GPU share what the trainer leaves, by vLLM's own limits: `kv_cache_memory_bytes`
fixes the KV cache, so that vLLM does not measure the device's free memory while a neighbour's changes, and
`gpu_memory_utilization`, which vLLM compares with the free memory as it boots, is all that the engine needs. The needs
of all who meet on a GPU never exceed what is free of it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.gpu_memory import VISIBLE_DEVICES, GpuDevice, named_devices

#: The trainer's name, as a program and in `EngineNeed.beside`.
TRAINER: Final = "trainer"
_MIB: Final = 1 << 20
#: Of an engine beside weights and KV cache: context, CUDA graphs, activations. An estimate; not measured.
OVERHEAD_BYTES: Final = 2 * 10**9
#: Share of a GPU that stays free where programs share it. A guard makes borrowers sleep where less than 3 % is free.
_SPARE: Final = 0.05
#: An engine with less KV cache would generate for few rollouts at a time.
_LEAST_KV_BYTES: Final = 512 * _MIB
#: vLLM's fraction of a GPU's memory where nothing sets it, by the workers' settings.
DEFAULT_UTILIZATION: Final = 0.9


class EngineNeed(Struct, frozen=True, kw_only=True):
    """What one engine asks of GPUs."""

    name: str
    devices: int = 1  # among which it divides its model
    weights_bytes: int = 0  # on all of its devices together
    kv_cache_mib: int = 0  # on each device; 0: as much as there is room for
    utilization: float = 0.0  # fraction of each device's memory to use; 0: not set
    is_vllm: bool = True  # other engines' memory is their own matter
    beside: str = ""  # the program whose devices it borrows; empty: it has its own


class DeviceShare(Struct, frozen=True, kw_only=True):
    """The devices that a program sees, and an engine's limits on each of them; without limits its own settings hold."""

    devices: tuple[GpuDevice, ...]
    kv_cache_mib: int = 0  # 0: no limits
    utilization: float = 0.0

    @property
    def environment(self) -> dict[str, str]:
        return {VISIBLE_DEVICES: ",".join(device.uuid for device in self.devices)}


#: program -> its devices. Programs that are not in it use no GPU, or see what this process sees.
Placement = Mapping[str, DeviceShare]


def chosen_devices(visible: Sequence[GpuDevice], gpus: str) -> tuple[GpuDevice, ...]:
    """Returns the devices that `--gpus` leaves: the first ones by a count, or those in a list of numbers and UUIDs.

    Empty: all. A list of one number ends with a comma. Raises `InvalidRequest` naming the option.
    """
    wanted = gpus.strip()
    if not wanted:
        return tuple(visible)
    if wanted.isdigit():
        if not int(wanted):
            raise InvalidRequest(f"is at least 1; to use no GPU, set {VISIBLE_DEVICES} to nothing", field="--gpus")
        if int(wanted) > len(visible):
            text = f"{wanted} are wanted, and {len(visible)} can be seen (nvidia-smi, {VISIBLE_DEVICES}); ask for fewer"
            raise InvalidRequest(text, field="--gpus")
        return tuple(visible[: int(wanted)])
    words = [word.strip() for word in wanted.removesuffix(",").split(",")]
    return named_devices(visible, words, field="--gpus")


def place_devices(
    devices: Sequence[GpuDevice], engines: Sequence[EngineNeed], *, ranks: int, trainer_bytes: int
) -> Placement:
    """Deals out the devices. `ranks`: training processes that use one each; `trainer_bytes`: what they need at least,
    together. Raises `InvalidRequest` naming the option or setting, and the remedy."""
    if not devices:
        return {}
    _check_instances(devices, engines, ranks)
    if ranks > len(devices):
        text = f"each of {ranks} training processes needs a GPU, and {len(devices)} can be used; ask for fewer"
        raise InvalidRequest(text, field="--ranks")
    placed: dict[str, tuple[GpuDevice, ...]] = {TRAINER: tuple(devices[:ranks])} if ranks else {}
    own = [engine for engine in engines if not engine.beside]
    placed |= _deal(devices, ranks, own)
    for engine in engines:
        if engine.beside:
            placed[engine.name] = _beside(engine, placed.get(engine.beside, ()))
    shares = {name: DeviceShare(devices=devices) for name, devices in placed.items()}
    limits, needs = _limits(placed, engines, trainer_bytes // max(1, ranks)), {one.name: one for one in engines}
    for name, kv_mib in limits.items():
        utilization = _fraction(needs[name], kv_mib, placed[name])
        shares[name] = DeviceShare(devices=placed[name], kv_cache_mib=kv_mib, utilization=utilization)
    return shares


def told(placement: Placement) -> Iterator[str]:
    """Says for people who runs where."""
    for name, share in placement.items():
        where = "GPU " + ", ".join(_number(device) for device in share.devices)
        yield f"{name}: {where}" + (f", {share.kv_cache_mib} MiB of KV cache" if share.kv_cache_mib else "")


def _number(device: GpuDevice) -> str:
    return device.uuid if device.is_mig else str(device.index)


def _check_instances(devices: Sequence[GpuDevice], engines: Sequence[EngineNeed], ranks: int) -> None:
    """CUDA shows a program one MIG instance only, and NCCL joins none."""
    if not any(device.is_mig for device in devices):
        return
    if ranks > 1:
        raise InvalidRequest("training processes on MIG instances cannot be joined; ask for one", field="--ranks")
    for engine in engines:
        if engine.devices > 1:
            text = f"{engine.name} cannot be divided among MIG instances; set it to 1, or name whole GPUs (--gpus)"
            raise InvalidRequest(text, field="vllm.tensor_parallel_size")


def _deal(devices: Sequence[GpuDevice], ranks: int, engines: Sequence[EngineNeed]) -> dict[str, tuple[GpuDevice, ...]]:
    """engine -> its devices: the next ones behind the trainer's. If they are too few, engines with one device share
    those that are left, in turn, and the trainer's if none is."""
    left, placed = list(devices[ranks:]), {}
    few = sum(engine.devices for engine in engines) > len(left)
    for engine in engines:
        if few and engine.devices == 1:
            continue
        if engine.devices > len(left):
            raise InvalidRequest(_too_few(engine, devices, ranks, engines), field="vllm.tensor_parallel_size")
        placed[engine.name] = tuple(left[: engine.devices])
        del left[: engine.devices]
    sharing = [engine for engine in engines if engine.name not in placed]
    pool = left or devices[:ranks]
    if sharing and not pool:
        raise InvalidRequest(_too_few(sharing[0], devices, ranks, engines), field="--workers")
    for number, engine in enumerate(sharing):
        placed[engine.name] = (pool[number % len(pool)],)
    return placed


def _too_few(engine: EngineNeed, devices: Sequence[GpuDevice], ranks: int, engines: Sequence[EngineNeed]) -> str:
    all_of_them = " + ".join([*([str(ranks)] if ranks else []), *(str(one.devices) for one in engines)])
    trainer = "trainer and engines" if ranks else "engines"
    return (
        f"{engine.name} needs {engine.devices} of its own, and {trainer} together {all_of_them} GPUs, of which "
        f"{len(devices)} can be used; lower it, ask for fewer --workers or --ranks, or allow more --gpus"
    )


def _beside(engine: EngineNeed, devices: tuple[GpuDevice, ...]) -> tuple[GpuDevice, ...]:
    if engine.devices > len(devices):
        text = f"{engine.name} is divided among {engine.devices} GPUs, and its lender has {len(devices)}; lower it"
        raise InvalidRequest(text, field="vllm.tensor_parallel_size")
    return devices[: engine.devices]


def _limits(
    placed: Mapping[str, tuple[GpuDevice, ...]], engines: Sequence[EngineNeed], rank_bytes: int
) -> dict[str, int]:
    """vLLM engine that has no devices for itself -> MiB of its KV cache on each: what the fullest of them allows."""
    tenants: dict[GpuDevice, list[EngineNeed]] = {}
    for engine in engines:
        for device in placed[engine.name] if engine.is_vllm else ():
            tenants.setdefault(device, []).append(engine)
    limits: dict[str, int] = {}
    for device, those in tenants.items():
        trains = device in placed.get(TRAINER, ())
        if len(those) > 1 or trains or not _has_room(device, those[0]):
            for name, kv_bytes in _divide(device, those, rank_bytes if trains else 0, trains=trains).items():
                limits[name] = min(limits.get(name, kv_bytes // _MIB), kv_bytes // _MIB)
    return limits


def _has_room(device: GpuDevice, engine: EngineNeed) -> bool:
    """Whether vLLM may boot there by its own settings."""
    return device.free_bytes >= (engine.utilization or DEFAULT_UTILIZATION) * device.total_bytes


def _divide(device: GpuDevice, tenants: Sequence[EngineNeed], rank_bytes: int, *, trains: bool) -> dict[str, int]:
    """engine -> bytes of its KV cache on a shared device. What nobody has asked for is divided evenly among the engines
    that state no size; a trainer there keeps half of it for activations.

    Raises `InvalidRequest` if the sizes do not add up.
    """
    stated = {engine.name: _stated_kv(engine, device) for engine in tenants}
    fixed = {engine.name: _bare(engine) + (stated[engine.name] or 0) for engine in tenants}
    open_ends = [name for name, kv_bytes in stated.items() if kv_bytes is None]
    room = device.free_bytes - int(_SPARE * device.total_bytes)
    rest = room - rank_bytes - sum(fixed.values())
    if rest < len(open_ends) * _LEAST_KV_BYTES:
        least = {name: size + (_LEAST_KV_BYTES if name in open_ends else 0) for name, size in fixed.items()}
        raise InvalidRequest(_no_room(device, room, ({TRAINER: rank_bytes} if trains else {}) | least), field="--gpus")
    shared = rest // 2 if trains else rest
    each = max(_LEAST_KV_BYTES, shared // len(open_ends)) if open_ends else 0
    return {name: each if kv_bytes is None else kv_bytes for name, kv_bytes in stated.items()}


def _no_room(device: GpuDevice, room: int, needs: Mapping[str, int]) -> str:
    wanted = ", ".join(f"{name} at least {size / 1e9:.1f} GB" for name, size in needs.items())
    return (
        f"GPU {_number(device)} ({device.name}) has {max(0, room) / 1e9:.1f} of {device.total_bytes / 1e9:.1f} GB to "
        f"share, and {wanted} are needed; allow more GPUs, ask for fewer --workers, lower vllm.kv_cache_mib "
        "(--worker-config), or let the trainer hold less (offload = true in --trainer-config)"
    )


def _bare(engine: EngineNeed) -> int:
    """Bytes of an engine on each of its devices without its KV cache."""
    return engine.weights_bytes // engine.devices + OVERHEAD_BYTES


def _stated_kv(engine: EngineNeed, device: GpuDevice) -> int | None:
    """Bytes of KV cache that the engine's settings ask for; None: they leave it open. Raises `InvalidRequest`."""
    if engine.kv_cache_mib:
        return engine.kv_cache_mib * _MIB
    if not engine.utilization:
        return None
    kv_bytes = int(engine.utilization * device.total_bytes) - _bare(engine)
    if kv_bytes < _LEAST_KV_BYTES:
        text = (
            f"{engine.name} would have no KV cache on GPU {_number(device)}: its weights and "
            f"{OVERHEAD_BYTES / 1e9:.1f} GB take {_bare(engine) / device.total_bytes:.2f} of it; raise it"
        )
        raise InvalidRequest(text, field="vllm.gpu_memory_utilization")
    return kv_bytes


def _fraction(engine: EngineNeed, kv_mib: int, devices: Sequence[GpuDevice]) -> float:
    """Fraction of a device's memory that is all the engine needs, rounded up to thousandths."""
    needed = _bare(engine) + kv_mib * _MIB
    return min(1.0, math.ceil(1000 * needed / min(device.total_bytes for device in devices)) / 1000)
