"""Declares and checks the settings of the serving-guard."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from msgspec import Meta, Struct, structs

from ebbtide.errors import InvalidRequest
from ebbtide.runtime import ProcessSettings
from ebbtide.serving_guard.governor.budget_decider import LatencyTargets, StepLimits
from ebbtide.serving_guard.proxy.proxy_limits import ProxySettings
from ebbtide.serving_guard.traffic.slo import (
    AimGap,
    AimSlowed,
    AimTpot,
    AimTtft,
    Percentile,
    Slo,
    TpotFactor,
    TpotMs,
    TtftFactor,
    TtftMs,
    read_slos,
)
from ebbtide.types.grants import Residency

#: What `give_up` wishes of engines.
_PLACES: Final = {"nothing": Residency.AWAKE, "cache": Residency.HOST, "weights": Residency.AWAY}
#: The guard's own settings that count whoever owns the device.
_SHARED: Final = {"owner", "grant_dir", "yield_ms", "kill_s", "max_stops"}


class TrainerDeviceSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a guard whose device is a trainer's."""

    give_up: Annotated[
        Literal["nothing", "cache", "weights"],
        Meta(
            description="what engines give up while the trainer has the device: keys and values (on a GPU all of its "
            "memory, with the weights in the host's), or the weights too, which come back from the host's mirror; "
            "nothing where both fit beside each other"
        ),
    ] = "cache"
    memory_s: Annotated[
        float, Meta(gt=0, description="how long a worker may take to give up memory before it is killed")
    ] = 60.0
    settle_s: Annotated[
        float, Meta(ge=0, description="how long a new guard waits for the device's owner before it lends")
    ] = 5.0
    silent_s: Annotated[float, Meta(gt=0, description="silence of the owner after which its device is lent")] = 15.0

    @property
    def residency(self) -> Residency:
        """Where engines' weights are to be while the trainer has the device."""
        return _PLACES[self.give_up]


class GuardSettings(ProcessSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one serving-guard."""

    owner: Annotated[
        Literal["server", "trainer"],
        Meta(
            description="whose device is lent: a serving engine's, as far as its users leave it idle, or a trainer's "
            "between its steps"
        ),
    ] = "server"
    listen: Annotated[str, Meta(description="address of the proxy: host:port (port 0: any free one)")] = (
        "127.0.0.1:8100"
    )
    upstream: Annotated[str, Meta(description="URL of the serving engine")] = "http://127.0.0.1:8000"
    grant_dir: Annotated[
        str,
        Meta(
            description="folder shared with the workers beside it, and with a trainer, this user's own: the socket and "
            "the pages"
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
        str, Meta(description="name of the served model, for status and slo_file; empty: as requests name it")
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
    step_tokens: Annotated[int, Meta(ge=1, description="tokens of all rollout steps at once, at most")] = 256
    sequences: Annotated[int, Meta(ge=1, description="rollouts in all rollout steps at once, at most")] = 64
    hold_ms: Annotated[
        float, Meta(ge=0, description="how long a request may wait for the rollout step under way, if that pays")
    ] = 20.0
    memory_limit_mib: Annotated[
        int, Meta(ge=0, description="memory for both engines' keys and values; 0: none stated")
    ] = 0
    serving_kv_mib: Annotated[
        int, Meta(ge=0, description="the part of it that the serving engine's pool takes; 0: unknown")
    ] = 0
    serving_kv_bytes_per_token: Annotated[
        int, Meta(ge=0, description="bytes of keys and values of one served token; 0: unknown")
    ] = 0
    yield_ms: Annotated[
        int, Meta(ge=10, description="how long after its predicted step a worker may go on before it is stopped")
    ] = 250
    kill_s: Annotated[
        float, Meta(gt=0, description="how long a stopped worker waits for a budget before it is killed")
    ] = 10.0
    max_stops: Annotated[
        int, Meta(ge=1, description="how often in ten minutes a worker is stopped; then it is killed")
    ] = 3
    observe_ms: Annotated[
        int, Meta(ge=5, description="mode observe: how often the engine's metrics are read while rollouts run")
    ] = 50
    metrics_url: Annotated[
        str, Meta(description="mode observe: the engine's metrics; empty: /metrics of the upstream")
    ] = ""
    proxy: ProxySettings = ProxySettings()
    trainer: TrainerDeviceSettings = TrainerDeviceSettings()

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
        shared = _SHARED.union(ProcessSettings.__struct_fields__)
        for key in _changed(self):
            table = key.partition(".")[0]
            reader = "trainer" if table == "trainer" else "server"
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
