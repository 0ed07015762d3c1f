"""Defines the settings that trainers and drivers share, and checks what they permit a run.

It imports neither the client nor anything of numpy, so that `--help` of both programs is quick.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta, Struct

from ebbtide.auth.security import ClientSecurity
from ebbtide.environments import BUILT_IN, DATASET
from ebbtide.errors import InvalidRequest
from ebbtide.hub_models import model_place
from ebbtide.runtime import ProcessSettings
from ebbtide.types.run import RunSpec

_ALLOWED: Final = "environments.allowed (EBBTIDE_ENVIRONMENTS_ALLOWED) of driver and trainer"


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
    data_roots: Annotated[
        tuple[str, ...],
        Meta(description="folders in which the files of a run's data set may be", extra={"shared": True}),
    ] = (".",)
    data_sets: Annotated[
        tuple[str, ...],
        Meta(description="data sets of the Hub that runs may use; * stands for any characters", extra={"shared": True}),
    ] = ("*",)
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
            setting=_ALLOWED,
        )
    if not spec.from_agents:  # of agents no other code runs here
        allowed = settings.environments.allowed
        check_listed(spec.environment.name, allowed, field="environment.name", setting=_ALLOWED)
    if spec.environment.name == DATASET:
        _check_dataset(spec, settings)
    _check_root(str(model_place(spec.model)), settings.model_roots, field="model", setting="model_roots")
    _check_root(spec.output, settings.output_roots, field="output", setting="output_roots")


def _check_dataset(spec: RunSpec, settings: WorkSettings) -> None:
    from ebbtide.environments.dataset import dataset_params

    params = dataset_params(spec.environment.params)
    if ":" in params.reward:
        field = "environment.params.reward"
        check_listed(params.reward, settings.environments.allowed, field=field, setting=_ALLOWED)
    if not params.place.local:
        setting = "data_sets (EBBTIDE_DATA_SETS) of driver and trainer"
        check_listed(params.place.data, settings.data_sets, field="environment.params.data", setting=setting)
        return
    for path in params.place.files().values():
        _check_root(str(path), settings.data_roots, field="environment.params.data", setting="data_roots")


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
