"""Declares and checks the settings of the serving-guard: the SLO of served models, limits of the proxy, a trainer's
device.

The SLO is stated by flags for any model, and in a TOML file with a table for each other one.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit

from msgspec import Meta, Struct, structs

from ebbtide.errors import InvalidRequest
from ebbtide.runtime import ProcessSettings
from ebbtide.serving_guard.governor.budget_decider import LatencyTargets, StepLimits
from ebbtide.types.grants import Residency
from ebbtide.types.parse import parse

TtftMs: TypeAlias = Annotated[
    float, Meta(ge=0, description="target of the time to first token (TTFT), ms; 0 derives it from ttft_factor")
]
TpotMs: TypeAlias = Annotated[
    float, Meta(ge=0, description="target of the time per output token (TPOT), ms; 0 derives it from tpot_factor")
]
TtftFactor: TypeAlias = Annotated[
    float, Meta(ge=0, description="TTFT target as a factor over the engine's learnt unloaded latency; 0 stands for 1.6")
]
TpotFactor: TypeAlias = Annotated[
    float,
    Meta(ge=0, description="TPOT target as a factor over the engine's learnt unloaded latency; 0 stands for 1.27"),
]
Percentile: TypeAlias = Annotated[
    float, Meta(gt=0, le=100, description="percentile of requests that must meet both targets")
]
AimTtft: TypeAlias = Annotated[
    float,
    Meta(
        ge=0,
        le=1,
        description="fraction of the TTFT target that rollouts may use; 0 gives them none while a request waits for "
        "its first token",
    ),
]
AimTpot: TypeAlias = Annotated[
    float,
    Meta(
        ge=0,
        le=1,
        description="fraction of the slack between the unloaded time per token and its target that rollouts may use; "
        "0 gives them idle time only",
    ),
]
AimGap: TypeAlias = Annotated[
    float,
    Meta(ge=1, description="maximum pause between two tokens while rollouts run, as a multiple of the TPOT target"),
]
AimSlowed: TypeAlias = Annotated[
    float,
    Meta(
        ge=1,
        description="maximum slowdown of a request's tokens by rollouts, as a multiple of the unloaded time per token",
    ),
]
_DEFAULT: Final = LatencyTargets()


class Slo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The SLO of one served model, as flags or file state it. Each target is stated in one way."""

    ttft_ms: TtftMs = 0.0
    tpot_ms: TpotMs = 0.0
    ttft_factor: TtftFactor = 0.0
    tpot_factor: TpotFactor = 0.0
    percentile: Percentile = _DEFAULT.percentile
    aim_ttft: AimTtft = _DEFAULT.aim_ttft
    aim_tpot: AimTpot = _DEFAULT.aim_tpot
    aim_gap: AimGap = _DEFAULT.aim_gap
    aim_slowed: AimSlowed = _DEFAULT.aim_slowed

    def targets(self) -> LatencyTargets:
        """Targets for the governor. Raises `InvalidRequest` naming the field if a target is stated twice, or a factor
        is below 1."""
        given: dict[str, float] = {}
        for name in ("ttft", "tpot"):
            absolute, factor = getattr(self, f"{name}_ms"), getattr(self, f"{name}_factor")
            if absolute and factor:
                raise InvalidRequest(f"{name}_ms is set too; leave one out", field=f"{name}_factor")
            if factor and factor < 1:
                raise InvalidRequest(
                    "no request can be faster than the engine alone; give 1 or more", field=f"{name}_factor"
                )
            given[f"{name}_s"] = absolute / 1000
            if factor:
                given[f"{name}_factor"] = factor
        same = ("percentile", "aim_ttft", "aim_tpot", "aim_gap", "aim_slowed")
        return LatencyTargets(**{name: getattr(self, name) for name in same}, **given)


def read_slos(path: Path, default: Slo) -> dict[str, Slo]:
    """The tables of the file, by model name; keys that a table lacks have the default's value.

    Raises `InvalidRequest` naming file, model and key.
    """
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(str(error), field=str(path)) from None
    return {model: _read_slo(path, model, table, default) for model, table in document.items()}


def _read_slo(path: Path, model: str, table: Any, default: Slo) -> Slo:
    where = f"{path}: {model}"
    if not isinstance(table, dict):
        raise InvalidRequest('must be a table: write the model\'s name as ["NAME"] above its keys', field=where)
    try:
        parse(Slo, table).targets()
        made = parse(Slo, {**_slo_defaults(default, table), **table})
        made.targets()
    except InvalidRequest as error:
        raise InvalidRequest(error.text, field=f"{where}.{error.field}") from None
    return made


def _slo_defaults(default: Slo, table: dict[str, Any]) -> dict[str, Any]:
    """The default's values, without those of a target that the table states."""
    values = {name: getattr(default, name) for name in default.__struct_fields__}
    for name in ("ttft", "tpot"):
        if {f"{name}_ms", f"{name}_factor"} & table.keys():
            values[f"{name}_ms"] = values[f"{name}_factor"] = 0.0
    return values


class ProxySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the proxy. Durations are seconds, sizes bytes.

    One client's connection holds at most twice `max_header_bytes`, `keep_body_bytes`, twice `buffer_bytes`, and what
    one read brings (256 KiB). All connections together hold at most `max_held_bytes`, and 16 KiB each that are not
    counted. Answers that are kept to read the engine's token counts (16 MiB), and the kernel's socket buffers, come on
    top.
    """

    max_header_bytes: Annotated[
        int,
        Meta(ge=1024, description="maximum bytes of a request's target and headers; larger ones are answered with 431"),
    ] = 64 << 10
    max_headers: Annotated[int, Meta(ge=8, description="maximum headers of a request; more are answered with 431")] = (
        128
    )
    max_body_bytes: Annotated[
        int, Meta(ge=1024, description="maximum bytes of a request's body; larger ones are answered with 413")
    ] = 256 << 20
    keep_body_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="bytes of an inference request that are kept to estimate its prompt; longer ones are streamed "
            "on",
        ),
    ] = 1 << 20
    buffer_bytes: Annotated[
        int,
        Meta(ge=4096, description="bytes waiting for one slow reader before the engine's answer is read no further"),
    ] = 256 << 10
    max_held_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20, description="maximum bytes held for all clients; beyond it, the clients that hold most are cut"
        ),
    ] = 512 << 20
    header_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds from a request's first byte to the end of its headers; later ones are answered with "
            "408",
        ),
    ] = 10.0
    body_timeout_s: Annotated[
        float, Meta(gt=0, description="seconds without a byte of an incomplete body after which the answer is 408")
    ] = 30.0
    min_body_rate: Annotated[
        int,
        Meta(
            ge=0,
            description="minimum bytes per second of a body on average, after body_timeout_s; slower ones are "
            "answered with 408; 0 sets no limit",
        ),
    ] = 256
    idle_timeout_s: Annotated[float, Meta(gt=0, description="seconds to keep a connection without a request")] = 75.0
    stall_timeout_s: Annotated[
        float, Meta(gt=0, description="seconds that a client may leave its answer unread before it is dropped")
    ] = 60.0
    max_connections: Annotated[
        int, Meta(ge=1, description="maximum connections of clients; at the limit the longest idle one is closed")
    ] = 4096
    max_per_client: Annotated[
        int,
        Meta(ge=0, description="maximum connections of one client address; 0 sets no limit, as behind a load balancer"),
    ] = 2048
    connect_timeout_s: Annotated[float, Meta(gt=0, description="seconds to connect to the engine")] = 5.0
    keep_upstream_s: Annotated[
        float,
        Meta(ge=0, description="seconds to keep an idle connection to the engine; less than the engine keeps it"),
    ] = 3.0
    max_hold_s: Annotated[
        float, Meta(ge=0, description="maximum seconds that a request waits for a rollout step to end; 0 never waits")
    ] = 0.5
    drain_s: Annotated[
        float, Meta(ge=0, description="seconds that requests in flight have to finish when the guard is asked to stop")
    ] = 30.0


#: What `give_up` wishes of engines.
_PLACES: Final = {"nothing": Residency.AWAKE, "cache": Residency.HOST, "weights": Residency.AWAY}
#: The guard's own settings that count whoever owns the device, and those that count for all that lend to engines.
_NEEDED: Final = {"owner", "grant_dir"}
_SHARED: Final = _NEEDED | {"yield_ms", "kill_s", "max_stops"}


class TrainerDeviceSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a guard whose device is a trainer's."""

    give_up: Annotated[
        Literal["nothing", "cache", "weights"],
        Meta(
            description="what engines release while the trainer has the device: the KV cache (on a GPU all of its "
            "memory, with the weights moved to the host), or the weights too, which come back from the host's "
            "mirror; nothing where both fit at the same time"
        ),
    ] = "cache"
    memory_s: Annotated[
        float, Meta(gt=0, description="seconds that a worker may take to give up memory before it is killed")
    ] = 60.0
    settle_s: Annotated[
        float, Meta(ge=0, description="seconds that a new guard waits for the device's owner before it lends")
    ] = 5.0
    silent_s: Annotated[
        float, Meta(gt=0, description="seconds of silence of the owner after which its device is lent")
    ] = 15.0

    @property
    def residency(self) -> Residency:
        """Where engines' weights are to be while the trainer has the device."""
        return _PLACES[self.give_up]


class TurnSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a guard on whose device several trainers take turns."""

    turn_s: Annotated[
        float,
        Meta(ge=0, description="seconds for which a trainer may keep its turn before it is killed; 0 sets no limit"),
    ] = 1800.0
    silent_s: Annotated[
        float, Meta(gt=0, description="seconds of silence of a trainer in its turn after which it is killed")
    ] = 15.0
    rejoin_s: Annotated[
        float,
        Meta(
            ge=0,
            description="seconds that a trainer in its turn has to connect again before it is killed, after its "
            "stream broke or a new guard began",
        ),
    ] = 10.0


class GuardSettings(ProcessSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one serving-guard."""

    owner: Annotated[
        Literal["server", "trainer", "turns"],
        Meta(
            description="owner of the device that is lent: server, whose engine is idle at times, or trainer, between "
            "its steps; turns: it is lent to no engine, and trainers of several runs take turns on it"
        ),
    ] = "server"
    listen: Annotated[str, Meta(description="address of the proxy, host:port; port 0 picks a free port")] = (
        "127.0.0.1:8100"
    )
    upstream: Annotated[str, Meta(description="URL of the serving engine")] = "http://127.0.0.1:8000"
    grant_dir: Annotated[
        str,
        Meta(
            description="folder shared with the workers of this host, and with a trainer, this user's own: the socket "
            "and the pages"
        ),
    ]
    mode: Annotated[
        Literal["proxy", "observe"],
        Meta(
            description="proxy: user traffic passes through the guard; observe: it does not, the guard reads the "
            "engine's metrics, rollouts give way up to observe_ms and an answer late, ttft_ms and tpot_ms are required"
        ),
    ] = "proxy"
    model: Annotated[
        str, Meta(description="name of the served model, for status and slo_file; by default the name in requests")
    ] = ""
    ttft_ms: TtftMs = 0.0
    tpot_ms: TpotMs = 0.0
    ttft_factor: TtftFactor = 0.0
    tpot_factor: TpotFactor = 0.0
    percentile: Percentile = Slo().percentile
    aim_ttft: AimTtft = Slo().aim_ttft
    aim_tpot: AimTpot = Slo().aim_tpot
    aim_gap: AimGap = Slo().aim_gap
    aim_slowed: AimSlowed = Slo().aim_slowed
    slo_file: Annotated[
        str, Meta(description="TOML file with a table for each served model whose SLO differs; keys as these flags")
    ] = ""
    step_tokens: Annotated[int, Meta(ge=1, description="maximum tokens of all concurrent rollout steps")] = 256
    sequences: Annotated[int, Meta(ge=1, description="maximum rollouts of all concurrent rollout steps")] = 64
    hold_ms: Annotated[
        float,
        Meta(ge=0, description="milliseconds that a request may wait for the rollout step in flight, if that pays"),
    ] = 20.0
    memory_limit_mib: Annotated[
        int, Meta(ge=0, description="memory for the KV caches of both engines, MiB; 0 if it is not stated")
    ] = 0
    serving_kv_mib: Annotated[
        int, Meta(ge=0, description="part of that memory that the serving engine's pool takes, MiB; 0 if it is unknown")
    ] = 0
    serving_kv_bytes_per_token: Annotated[
        int, Meta(ge=0, description="bytes of KV cache of one served token; 0 if they are unknown")
    ] = 0
    yield_ms: Annotated[
        int,
        Meta(
            ge=10,
            description="milliseconds after its predicted step for which a worker may continue before it is stopped",
        ),
    ] = 250
    kill_s: Annotated[
        float, Meta(gt=0, description="seconds that a stopped worker waits for a budget before it is killed")
    ] = 10.0
    max_stops: Annotated[int, Meta(ge=1, description="stops within ten minutes after which a worker is killed")] = 3
    observe_ms: Annotated[
        int,
        Meta(ge=5, description="mode observe: milliseconds between reads of the engine's metrics while rollouts run"),
    ] = 50
    metrics_url: Annotated[
        str, Meta(description="mode observe: URL of the engine's metrics; by default /metrics of the upstream")
    ] = ""
    proxy: ProxySettings = ProxySettings()
    trainer: TrainerDeviceSettings = TrainerDeviceSettings()
    turns: TurnSettings = TurnSettings()

    def slo(self) -> Slo:
        """The SLO of models that the file does not name."""
        return Slo(**{name: getattr(self, name) for name in Slo.__struct_fields__})

    def targets(self) -> dict[str, LatencyTargets]:
        """Targets by model; "" for any other model. Raises `InvalidRequest` naming the field."""
        default = self.slo()
        named = read_slos(Path(self.slo_file), default) if self.slo_file else {}
        return {"": default.targets(), **{model: slo.targets() for model, slo in named.items()}}

    def limits(self) -> StepLimits:
        return StepLimits(tokens=self.step_tokens, sequences=self.sequences, hold_s=self.hold_ms / 1000)

    def checked(self) -> None:
        """Raise `InvalidRequest` naming the first invalid field, before anything is started."""
        self._checked_owner()
        self.targets()
        for name in ("upstream", "metrics_url"):
            url = urlsplit(getattr(self, name))
            schemes = ("http",) if self.mode == "proxy" else ("http", "https")
            if getattr(self, name) and (url.scheme not in schemes or not url.hostname):
                raise InvalidRequest("give a URL such as http://127.0.0.1:8000", field=name)
        if self.mode == "observe":
            self._checked_observe()
        elif self.metrics_url:
            raise InvalidRequest(
                "is read in mode observe only; leave it out, or set mode = observe", field="metrics_url"
            )
        if self.hold_ms / 1000 > self.proxy.max_hold_s:
            raise InvalidRequest(f"is more than proxy.max_hold_s ({self.proxy.max_hold_s:g} s)", field="hold_ms")

    def _checked_owner(self) -> None:
        """What is read for another owner has no effect, and was meant to have one."""
        own = _NEEDED if self.owner == "turns" else _SHARED
        shared = own.union(ProcessSettings.__struct_fields__)
        for key in _changed(self):
            table = key.partition(".")[0]
            reader = table if table in {"trainer", "turns"} else "server"
            if table not in shared and reader != self.owner:
                text = f"is read with owner = {reader} only; set owner = {reader}, or leave it out"
                raise InvalidRequest(text, field=key)

    def _checked_observe(self) -> None:
        if self.slo_file:
            raise InvalidRequest("metrics do not distinguish models; give the SLO by flags", field="slo_file")
        for name in ("ttft_ms", "tpot_ms"):
            if not getattr(self, name):
                message = "metrics do not show which request was alone, so no factor can be learnt; give milliseconds"
                raise InvalidRequest(message, field=name)


def _changed(settings: Struct) -> Iterator[str]:
    """The keys whose values are not their defaults: `name`, or `table.name`."""
    for field in structs.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, Struct):
            yield from (f"{field.name}.{inner}" for inner in _changed(value))
        elif value != field.default:
            yield field.name
