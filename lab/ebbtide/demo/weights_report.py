"""Reports the cost of the demo's weights: bytes of each version against dense ones, and pauses of the programs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Final

from msgspec import Struct

from ebbtide.cli.views.run import RunProgress, WorkerInstall
from ebbtide.cli.views.tables import amount

#: A step's value: seconds until the trainer could go on after publishing, the copy included.
_PUBLISH: Final = "seconds_publish"


class Published(Struct, frozen=True, kw_only=True):
    """A version that the trainer published after a step."""

    step: int
    version: int
    bytes: int  # sent to the relay
    dense_bytes: int  # of the whole version
    patch: bool  # sent as a patch, not dense
    density: float  # share of elements that changed
    pause_s: float  # the trainer stood still
    seconds: float  # until the version was announced


class WeightsFigures(Struct, frozen=True, kw_only=True):
    """Means over versions, workers and steps; None: unknown."""

    published: list[Published]
    bytes_per_version: float | None
    dense_bytes_per_version: float | None
    bytes_over_dense: float | None
    density: float | None
    trainer_stop_s: float | None  # the trainer stood still, for the copy alone
    publish_step_s: float | None  # with waits for the former version
    installs: int
    pull_s: float | None
    install_stop_s: float | None  # generation stood still
    install_stop_worst_s: float | None
    install_stop_share_of_step: float | None


def weights_figures(progress: RunProgress) -> WeightsFigures:
    """Computes the figures from a run's events; leaves out each worker's first install, which is its boot."""
    published = [one for _, values in sorted(progress.steps.items()) if (one := _published(values)) is not None]
    installs = list(_updates(progress.installs))
    took, dense = sum(one.bytes for one in published), sum(one.dense_bytes for one in published)
    stop_s, step_s = _mean([one.pause_s for one in installs]), _step_s(progress.steps)
    return WeightsFigures(
        published=published,
        bytes_per_version=_mean([one.bytes for one in published]),
        dense_bytes_per_version=_mean([one.dense_bytes for one in published]),
        bytes_over_dense=took / dense if dense else None,
        density=_mean([one.density for one in published]),
        trainer_stop_s=_mean([one.pause_s for one in published]),
        publish_step_s=_mean([values[_PUBLISH] for values in progress.steps.values() if _PUBLISH in values]),
        installs=len(installs),
        pull_s=_mean([one.pull_s for one in installs]),
        install_stop_s=stop_s,
        install_stop_worst_s=max((one.pause_s for one in installs), default=None),
        install_stop_share_of_step=stop_s / step_s if stop_s is not None and step_s else None,
    )


def told(figures: WeightsFigures) -> Iterator[tuple[str, str]]:
    """Describes the known figures for people."""
    size, dense, share = figures.bytes_per_version, figures.dense_bytes_per_version, figures.bytes_over_dense
    if size is not None and dense is not None and share is not None:
        changed = f", as {figures.density:.1%} of the elements change" if figures.density is not None else ""
        patches = sum(one.patch for one in figures.published)
        by = f"{patches} of {len(figures.published)} versions by patches"
        yield "weights", f"{amount(size)} per version, {share:.1%} of {amount(dense)} dense{changed}; {by}"
    if figures.trainer_stop_s is not None:
        of_step = figures.publish_step_s
        whole = f", and {1000 * of_step:,.0f} ms of a step went to publishing" if of_step is not None else ""
        yield "publishing", f"the trainer paused {1000 * figures.trainer_stop_s:,.0f} ms for the copy{whole}"
    stop_s, worst_s, share = figures.install_stop_s, figures.install_stop_worst_s, figures.install_stop_share_of_step
    if stop_s is not None and worst_s is not None:
        part = f", {share:.2%} of a step" if share is not None else ""
        worst = f"at most {1000 * worst_s:,.0f} ms, {figures.installs} installs"
        yield "installing", f"generation paused {1000 * stop_s:,.0f} ms per version{part} ({worst})"


def _updates(installs: Iterable[WorkerInstall]) -> Iterator[WorkerInstall]:
    booted: set[str] = set()
    for one in installs:
        if one.worker in booted:
            yield one
        booted.add(one.worker)


def _published(values: Mapping[str, float]) -> Published | None:
    if "publish_bytes" not in values:  # a former trainer published its version
        return None
    return Published(
        step=int(values["step"]),
        version=int(values["version"]),
        bytes=int(values["publish_bytes"]),
        dense_bytes=int(values["publish_dense_bytes"]),
        patch=bool(values["publish_patch"]),
        density=values["publish_density"],
        pause_s=values["publish_pause_s"],
        seconds=values["publish_seconds"],
    )


def _step_s(steps: Mapping[int, Mapping[str, float]]) -> float | None:
    """Mean seconds of a step after the first, which waits for evaluation."""
    later = (values for step, values in steps.items() if step > 1)
    return _mean([sum(value for name, value in one.items() if name.startswith("seconds_")) for one in later])


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
