"""Writes and reads checkpoints: directories that `transformers` loads, with all else that a resume needs.

    step-000010/                 config, weights and tokenizer, as Hugging Face writes them
    step-000010/trainer/         state.json (below), optimizer.safetensors, random.safetensors
    step-000010/trainer/optimizer/   instead of optimizer.safetensors: a file of each of several ranks

Any number of ranks reads what any number wrote (`ebbtide.trainer.ranks.sharding`). What a checkpoint holds is copied to
host memory first, where there is room, and written beside the next steps.

Invariant: a directory called `step-N` is whole, durable and never written again: it is made under another name, synced
and renamed. Only trainers that hold the run's lease begin one; a superseded trainer may finish its own, which is valid
too. The next trainer removes what a dead one left unfinished. Tensors are safetensors, all else is JSON; no pickle.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import torch
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ebbtide.errors import InvalidRequest
from ebbtide.run_client import RunFailed
from ebbtide.runtime import fsync
from ebbtide.telemetry import get_logger
from ebbtide.trainer.collectors import ConsumedTrajectory
from ebbtide.trainer.learning.learner import LearnerRanks
from ebbtide.trainer.learning.network import Network, Tokenizer, save_network
from ebbtide.trainer.ranks.rank_world import agreeing
from ebbtide.trainer.ranks.sharding import (
    INDEX,
    gathered_files,
    host_copy,
    read_shards,
    shard_name,
    weight_index,
    write_shards,
)
from ebbtide.types.ids import new_fence
from ebbtide.types.run import RunEvent

log = get_logger(__name__)

#: Raise it when the contents change in meaning: other formats are refused, not misread.
FORMAT: Final = 1
_UNFINISHED: Final = ".unfinished-"
_PREFIX: Final = "step-"
#: How often rank 0 looks whether the others have written.
_LOOK_S: Final = 0.02
#: Keys that mark tensors and mappings in nested state, which JSON cannot hold.
_TENSOR, _ITEMS = "$tensor", "$items"


class CheckpointError(RunFailed):
    """The run cannot resume from a checkpoint."""


class TrainingState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of a training beside its tensors."""

    run_id: str
    lineage: str
    step: int
    version: int  # policy version of these weights
    cursor: str = ""  # reading resumes after it
    consumed: tuple[ConsumedTrajectory, ...] = ()  # decided on, but not yet reported to the coordinator
    reports: tuple[RunEvent, ...] = ()  # events not yet reported
    format: int = FORMAT


#: Writes a checkpoint durably, and returns its directory. Called once, in any thread.
Store: TypeAlias = Callable[[], Path]


def copied(
    folder: Path, network: Network, tokenizer: Tokenizer, learner_state: Mapping[str, Any], state: TrainingState
) -> Store:
    """Copies the checkpoint of `state.step` to host memory, so that training may go on. Returns what writes it into
    `folder`."""
    known: dict[tuple[int, torch.Size], torch.Tensor] = {}
    weights = {name: _copied_once(tensor, known) for name, tensor in network.state_dict().items()}
    tensors: dict[str, torch.Tensor] = {}
    tree = _flatten(learner_state, "", tensors)
    moments = {name: host_copy(tensor) for name, tensor in tensors.items()}
    return partial(_store_whole, folder, network, tokenizer, weights, moments, tree, read_random_state(), state)


def _copied_once(tensor: torch.Tensor, known: dict[tuple[int, torch.Size], torch.Tensor]) -> torch.Tensor:
    """Copies it, tied ones once: they are known by their address."""
    place = (tensor.data_ptr(), tensor.shape)
    if place not in known:
        known[place] = host_copy(tensor)
    return known[place]


def write(
    folder: Path, network: Network, tokenizer: Tokenizer, learner_state: Mapping[str, Any], state: TrainingState
) -> Path:
    """Writes the checkpoint of `state.step` durably into `folder`. Returns its directory."""
    tensors: dict[str, torch.Tensor] = {}
    tree = _flatten(learner_state, "", tensors)
    return _store_whole(folder, network, tokenizer, None, tensors, tree, read_random_state(), state)


def _store_whole(
    folder: Path,
    network: Network,
    tokenizer: Tokenizer,
    weights: Mapping[str, torch.Tensor] | None,
    moments: Mapping[str, torch.Tensor],
    tree: Any,
    random_state: dict[str, torch.Tensor],
    state: TrainingState,
) -> Path:
    unfinished = folder / f"{_UNFINISHED}{state.lineage}"
    save_network(network, tokenizer, unfinished, weights=weights)
    inner = unfinished / "trainer"
    inner.mkdir()
    save_file({name: tensor.cpu().contiguous() for name, tensor in moments.items()}, inner / "optimizer.safetensors")
    return _seal(folder, unfinished, tree, random_state, state, ranks=1)


def begin(folder: Path, network: Network, tokenizer: Tokenizer, state: TrainingState) -> Path:
    """Makes, on rank 0, the directory of a checkpoint that several ranks write. Returns it."""
    unfinished = folder / f"{_UNFINISHED}{state.lineage}"
    (unfinished / "trainer" / "optimizer").mkdir(parents=True)
    network.config.dtype = torch.float32  # as the files are
    network.config.save_pretrained(unfinished)
    if network.can_generate():
        network.generation_config.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    return unfinished


class CheckpointPart:
    """A rank's part of a checkpoint that several ranks write: files of weights, and its shards of the optimiser."""

    def __init__(
        self, unfinished: Path, network: Network, learner_state: Mapping[str, Any], ranks: LearnerRanks, *, aside: bool
    ) -> None:
        """All ranks call it together. `aside`: copies all to host memory; else it writes here and now, file by file.

        Raises `CheckpointError` if this rank does not find rank 0's directory, and on all ranks if one does not: they
        gather weights together.
        """
        self._inner, self._rank, self._unfinished = unfinished / "trainer", ranks.rank, unfinished
        with agreeing(ranks.add_up):
            if not (self._inner / "optimizer").is_dir():
                text = "the run's output must be a directory that the hosts of all ranks share"
                raise CheckpointError(f"rank {ranks.rank} does not find {str(unfinished)!r}: {text}")
        tensors: dict[str, torch.Tensor] = {}
        self.tree = _flatten(learner_state, "", tensors)  # the learner's state without tensors, for `finish`
        self._index = weight_index(network, ranks.size) if ranks.rank == 0 else ""
        self._files: dict[str, dict[str, torch.Tensor]] = {}
        for name, weights in gathered_files(network, ranks.rank, ranks.size):
            self._files[name] = weights
            if not aside:
                self._store_files()
        self._shards: dict[str, torch.Tensor] | None = tensors
        if aside:
            self._shards = {name: host_copy(tensor) for name, tensor in tensors.items()}
        else:
            self._store_shards()

    def store(self) -> None:
        """Writes the part durably, and leaves a mark for rank 0."""
        self._store_files()
        self._store_shards()
        if self._index:
            (self._unfinished / INDEX).write_text(self._index, encoding="utf-8")
        _mark(self._inner, self._rank).touch()

    @property
    def wanted(self) -> bool:
        """Whether the checkpoint is still where rank 0 began it."""
        return self._inner.is_dir()

    def _store_files(self) -> None:
        while self._files:
            name, weights = self._files.popitem()
            save_file(weights, self._unfinished / name, metadata={"format": "pt"})
            fsync(self._unfinished / name)

    def _store_shards(self) -> None:
        if self._shards is not None:
            write_shards(self._shards, self._inner / "optimizer", self._rank)
            self._shards = None


def _mark(inner: Path, rank: int) -> Path:
    """The file that says that a rank has written its part."""
    return inner / f".written-{rank}"


def finish(
    unfinished: Path, tree: Any, random_state: dict[str, torch.Tensor], state: TrainingState, ranks: int
) -> Path:
    """Waits, on rank 0, until all ranks have written their parts, and completes the checkpoint. Returns its directory.

    Raises `OSError` if the directory was removed, as a later trainer of the run does.
    """
    inner = unfinished / "trainer"
    while not all(_mark(inner, rank).exists() for rank in range(ranks)):
        inner.stat()
        time.sleep(_LOOK_S)
    for rank in range(ranks):
        _mark(inner, rank).unlink()
    for path in unfinished.iterdir():
        if path.is_file():
            path.chmod(0o644)  # workers may run as another user
            fsync(path)
    unfinished.chmod(0o755)
    fsync(unfinished / "trainer" / "optimizer")
    return _seal(unfinished.parent, unfinished, tree, random_state, state, ranks)


def _seal(
    folder: Path,
    unfinished: Path,
    tree: Any,
    random_state: dict[str, torch.Tensor],
    state: TrainingState,
    ranks: int,
) -> Path:
    final, inner = folder / f"{_PREFIX}{state.step:06d}", unfinished / "trainer"
    save_file(random_state, inner / "random.safetensors")
    body = {"training": msgspec.to_builtins(state), "learner": tree, "ranks": ranks}
    (inner / "state.json").write_text(json.dumps(body, allow_nan=False), encoding="utf-8")
    for path in [*(path for path in inner.iterdir() if path.is_file()), inner, unfinished]:
        fsync(path)
    if final.exists():
        shutil.rmtree(unfinished)
    else:
        unfinished.rename(final)
    fsync(folder)
    return final


def latest(folder: Path) -> Path | None:
    """Returns the newest whole checkpoint in `folder`, or None."""
    found = _by_step(folder)
    return found[-1] if found else None


def _by_step(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{_PREFIX}*"), key=lambda path: (len(path.name), path.name))


def read_state(
    checkpoint: Path, *, run_id: str, parameters: Sequence[torch.Tensor] = (), in_host: bool = False
) -> tuple[TrainingState, dict[str, Any]]:
    """Returns the training's state and the learner's; also sets the process's random state.

    `parameters` are the optimiser's; its state is read in their shards, and onto their devices unless it is kept
    `in_host` memory. Raises `CheckpointError`
    naming the directory if it is of another run or format, or damaged.
    """
    inner = checkpoint / "trainer"
    try:
        body = json.loads((inner / "state.json").read_text(encoding="utf-8"))
        _check_format(checkpoint, body["training"]["format"])  # a later format may have unknown fields
        state = msgspec.convert(body["training"], TrainingState)
        tree = msgspec.convert(body["learner"], dict[str, Any])
        learner = _unflatten(tree, _optimizer(inner, int(body.get("ranks", 1)), parameters, in_host))
        random_state = load_file(inner / "random.safetensors")
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # `RuntimeError`s that say nothing of the files
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{str(checkpoint)!r} is damaged ({error}): bring back a whole copy") from error
    if state.run_id != run_id:
        raise CheckpointError(f"{str(checkpoint)!r} is of run {state.run_id}: not resumable by run {run_id}")
    _set_random_state(random_state)
    return state, learner


def _check_format(checkpoint: Path, found: object) -> None:
    if found != FORMAT:
        raise CheckpointError(
            f"{str(checkpoint)!r} has format {found}, and this trainer reads only {FORMAT}: resume with the release "
            "that wrote it"
        )


def _optimizer(inner: Path, ranks: int, parameters: Sequence[torch.Tensor], in_host: bool) -> dict[str, torch.Tensor]:
    """Reads the optimiser's tensors. Raises `OSError` for a missing part, and what reading raises."""
    folder = inner / "optimizer" if ranks > 1 else inner
    names = map(shard_name, range(ranks)) if ranks > 1 else ("optimizer.safetensors",)
    if missing := next((name for name in names if not (folder / name).is_file()), ""):
        raise FileNotFoundError(f"of {ranks} parts one is missing: {missing}")
    return read_shards(folder, parameters, in_host=in_host)


def keep_newest(folder: Path, count: int) -> None:
    """Removes all but the `count` newest checkpoints."""
    for old in _by_step(folder)[:-count]:
        _remove(old)


def prepare(folder: Path) -> Path | None:
    """Makes `folder` and removes unfinished checkpoints. Returns the newest whole one. Raises `InvalidRequest` naming
    `output` if the folder is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in [*folder.glob(f"{_UNFINISHED}*"), *folder.glob(f".{_UNFINISHED}*")]:  # the latter: its weights
            _remove(left)
        (probe := folder / f"{_UNFINISHED}probe").mkdir()
        probe.rmdir()
    except OSError as error:
        raise InvalidRequest(f"the trainer cannot write checkpoints there ({error})", field="output") from error
    return latest(folder)


def _remove(directory: Path) -> None:
    """Removes it as a whole: a dead process leaves no half of a checkpoint, and an unfinished one's writer may live."""
    aside = directory.with_name(f"{_UNFINISHED}{new_fence()}")
    try:
        directory.rename(aside)
        shutil.rmtree(aside)
    except OSError as error:
        log.warning("a former checkpoint could not be removed", path=str(directory), reason=str(error))


def _flatten(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Returns `value` as JSON, and puts its tensors into `tensors` by path. Mappings keep keys that are no strings."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach()
        return {_TENSOR: path}
    if isinstance(value, Mapping):
        items = [[key, _flatten(item, f"{path}/{key}", tensors)] for key, item in value.items()]
        return {_ITEMS: items}
    if isinstance(value, list | tuple):
        return [_flatten(item, f"{path}/{number}", tensors) for number, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{path}: a {type(value).__name__} cannot be kept in a checkpoint")


def _unflatten(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(tree, dict):
        if _TENSOR in tree:
            return tensors[tree[_TENSOR]]
        return {key: _unflatten(item, tensors) for key, item in tree[_ITEMS]}
    return [_unflatten(item, tensors) for item in tree] if isinstance(tree, list) else tree


def read_random_state() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda.{number}": state for number, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _set_random_state(states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    for number in range(torch.cuda.device_count()):
        if (state := states.get(f"cuda.{number}")) is not None:
            torch.cuda.set_rng_state(state, number)
