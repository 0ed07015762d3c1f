"""Checks what a run names (environment, model, output) against the settings, before anything of it is loaded."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from ebbtide.claimed_runs.settings import WorkSettings
from ebbtide.errors import InvalidRequest
from ebbtide.types.run import RunSpec


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
