"""What the demo's weights cost: bytes of each version against dense ones, and how long anybody stood still for them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Final

from msgspec import Struct

from ebbtide.cli.views.run_progress import RunProgress, WorkerInstall
from ebbtide.cli.views.tables import amount

#: Of a step's values: seconds until the trainer could go on behind its publishing, the copy included.
_PUBLISH: Final = "seconds_publish"


class Published(Struct, frozen=True, kw_only=True):
    """What a version took that the trainer published behind a step: `bytes` went to the relay, where all of it has
    `dense_bytes`, as a `patch` or dense; `density` is the share of elements that changed; for `pause_s` the trainer
    stood still, `seconds` later the version was announced."""

    step: int
    version: int
    bytes: int
    dense_bytes: int
    patch: bool
    density: float
    pause_s: float
    seconds: float


class WeightsFigures(Struct, frozen=True, kw_only=True):
    """`bytes_over_dense`: of all versions `published`. Seconds and shares are of one worker and one version: generation
    stood still for `install_stop_s`, on average, which is that share of the mean step's time. The trainer stood still
    for `trainer_stop_s`, for the copy alone; its steps had `publish_step_s` for publishing, which also waits where the
    version before is still on its way. None: not known.
    """

    published: list[Published]
    bytes_per_version: float | None
    dense_bytes_per_version: float | None
    bytes_over_dense: float | None
    density: float | None
    trainer_stop_s: float | None
    publish_step_s: float | None
    installs: int
    pull_s: float | None
    install_stop_s: float | None
    install_stop_worst_s: float | None
    install_stop_share_of_step: float | None


def weights_figures(progress: RunProgress) -> WeightsFigures:
    """Out of the events of a run; of each worker's installs all but the first, which is its boot."""
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
    """Lines for a person, of what is known."""
    size, dense, share = figures.bytes_per_version, figures.dense_bytes_per_version, figures.bytes_over_dense
    if size is not None and dense is not None and share is not None:
        changed = f", as {figures.density:.1%} of the elements change" if figures.density is not None else ""
        patches = sum(one.patch for one in figures.published)
        by = f"{patches} of {len(figures.published)} versions by patches"
        yield "weights", f"{amount(size)} per version, {share:.1%} of {amount(dense)} dense{changed}; {by}"
    if figures.trainer_stop_s is not None:
        of_step = figures.publish_step_s
        whole = f", and {1000 * of_step:,.0f} ms of a step went to publishing" if of_step is not None else ""
        yield "publishing", f"the trainer stood still {1000 * figures.trainer_stop_s:,.0f} ms for the copy{whole}"
    stop_s, worst_s, of_step = (
        figures.install_stop_s,
        figures.install_stop_worst_s,
        figures.install_stop_share_of_step,
    )
    if stop_s is not None and worst_s is not None:
        part = f", {of_step:.2%} of a step" if of_step is not None else ""
        worst = f"at most {1000 * worst_s:,.0f} ms, {figures.installs} installs"
        yield "installing", f"generation stood still {1000 * stop_s:,.0f} ms per version{part} ({worst})"


def _updates(installs: Iterable[WorkerInstall]) -> Iterator[WorkerInstall]:
    booted: set[str] = set()
    for one in installs:
        if one.worker in booted:
            yield one
        booted.add(one.worker)


def _published(values: Mapping[str, float]) -> Published | None:
    if "publish_bytes" not in values:  # its version was published by a trainer before
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
    """A step's seconds on average, behind the first, which waits for evaluation."""
    later = [
        sum(value for name, value in values.items() if name.startswith("seconds_"))
        for step, values in steps.items()
        if step > 1
    ]
    return _mean(later)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
