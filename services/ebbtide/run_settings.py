"""Defines the settings that trainers and drivers share, and checks what they permit a run.

It imports neither the client nor anything of numpy, so that `--help` of both programs is quick.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from ebbtide.auth.security import ClientSecurity
from ebbtide.environments import BUILT_IN
from ebbtide.errors import InvalidRequest
from ebbtide.runtime import ProcessSettings
from ebbtide.types.run import RunSpec


class AllowedEnvironments(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    allowed: Annotated[
        tuple[str, ...],
        Meta(
            description="environments that runs may use; * stands for any characters",
            extra={"shared": "environments_allowed"},
        ),
    ] = tuple(sorted(BUILT_IN))


class WorkSettings(ProcessSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    coordinator: Annotated[
        str, Meta(description="address of the coordinator; separate several by commas", extra={"shared": True})
    ] = "127.0.0.1:7600"
    relay: Annotated[str, Meta(description="address of the weight-relay", extra={"shared": True})] = "127.0.0.1:7610"
    security: ClientSecurity = ClientSecurity()
    run_id: Annotated[str, Meta(description="run to work on; by default all runs, one after another")] = ""
    once: Annotated[bool, Meta(description="exit when the run has ended")] = False
    holder: Annotated[
        str, Meta(description="unique name of this process; a restart under the same name regains its lease at once")
    ] = ""
    patience_s: Annotated[
        float, Meta(gt=0, description="seconds after which unreachable services interrupt the work")
    ] = 60.0
    environments: AllowedEnvironments = AllowedEnvironments()
    model_roots: Annotated[
        tuple[str, ...], Meta(description="folders in which a run's model may be", extra={"shared": True})
    ] = ("/",)
    output_roots: Annotated[
        tuple[str, ...], Meta(description="folders in which a run's output may be", extra={"shared": True})
    ] = (".",)


def check_permitted(spec: RunSpec, settings: WorkSettings) -> None:
    """Raises `InvalidRequest` naming the spec's field and the setting for what the settings do not allow."""
    for name, verifier in spec.environment.verifiers.items():
        check_listed(
            verifier,
            settings.environments.allowed,
            field=f"environment.verifiers.{name}",
            setting="environments.allowed (EBBTIDE_ENVIRONMENTS_ALLOWED) of driver and trainer",
        )
    if not spec.from_agents:  # of agents no other code runs here
        check_listed(
            spec.environment.name,
            settings.environments.allowed,
            field="environment.name",
            setting="environments.allowed (EBBTIDE_ENVIRONMENTS_ALLOWED) of driver and trainer",
        )
    _check_root(spec.model, settings.model_roots, field="model", setting="model_roots")
    _check_root(spec.output, settings.output_roots, field="output", setting="output_roots")


def check_listed(name: str, allowed: Sequence[str], *, field: str, setting: str) -> None:
    """Raises `InvalidRequest` unless one of the patterns `allowed` fits `name`."""
    if not any(fnmatchcase(name, pattern) for pattern in allowed):
        raise InvalidRequest(
            f"{name!r} is not allowed here, only {', '.join(allowed) or 'nothing'}; "
            f"the operator of the cluster can add it to {setting}",
            field=field,
        )


def _check_root(path: str, roots: Sequence[str], *, field: str, setting: str) -> None:
    try:
        place = Path(path).resolve()  # where links lead
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidRequest(f"{path[:200]!r} is no path: {error}", field=field) from None
    if not any(place.is_relative_to(Path(root).resolve()) for root in roots):
        raise InvalidRequest(
            f"{str(place)!r} is not below {', '.join(roots) or 'any folder'}; choose another place, or have it added "
            f"to {setting} (EBBTIDE_{setting.upper()}) of driver and trainer",
            field=field,
        )
