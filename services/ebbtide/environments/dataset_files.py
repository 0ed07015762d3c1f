"""Reads rows of data sets: JSONL files in place, Parquet files and data sets of the Hugging Face Hub by `datasets`.

What `datasets` reads is written as JSONL once, into its own cache, so that an isolated process needs neither that
library nor a network: it is shown one file.
"""

import os
import tempfile
import weakref
from array import array
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import msgspec

from ebbtide.environments import Split
from ebbtide.errors import InvalidRequest
from ebbtide.hub_models import is_hub_name

DATA_FIELD: Final = "environment.params.data"
_SPLITS_FIELD: Final = "environment.params.splits"
_JSONL: Final = (".jsonl", ".json", ".ndjson")
_PARQUET: Final = ".parquet"
#: Bytes of one row: its prompt has to fit into a context, and its answer into a frame of a process.
_MOST_ROW: Final = 4 << 20


class DataPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run's rows are. `splits` names a file or a Hub split for each split of the run; without it, all rows are
    of one file or one Hub split, and are divided by their questions."""

    data: str
    splits: Mapping[Split, str] = {}
    subset: str = ""  # configuration of a data set of the Hub
    revision: str = ""

    @property
    def local(self) -> bool:
        """Whether it names files here, rather than a data set of the Hub. Existing paths win."""
        path = Path(self.data).expanduser()
        looks = self.data.startswith(("/", ".", "~")) or path.suffix in (*_JSONL, _PARQUET)
        return looks or path.exists()

    def files(self) -> dict[Split, Path]:
        """The files that a local place names, absolute: one for `train`, or one for each of `splits`."""
        data = Path(self.data).expanduser().absolute()
        return {split: data / name for split, name in self.splits.items()} or {"train": data}


def prepared(place: DataPlace) -> DataPlace:
    """Returns a place of JSONL files with the same rows. Raises `InvalidRequest` naming the parameter."""
    if not place.local:
        wanted = dict(place.splits) or {"train": "train"}
        found = {split: _of_hub(place, name) for split, name in wanted.items()}
    else:
        is_folder = Path(place.data).expanduser().is_dir()
        if is_folder and not place.splits:
            example = 'splits = { train = "train.jsonl", eval = "test.jsonl" }'
            raise InvalidRequest(f"{place.data!r} is a folder; name its files: {example}", field=_SPLITS_FIELD)
        if place.splits and not is_folder:
            text = f"names files of a folder, and {place.data!r} is none; give their folder as data, or leave this out"
            raise InvalidRequest(text, field=_SPLITS_FIELD)
        found = {split: _as_jsonl(path) for split, path in place.files().items()}
    if not place.splits:
        return DataPlace(data=str(found["train"]))
    return DataPlace(data="/", splits={split: str(path) for split, path in found.items()})


def _as_jsonl(path: Path) -> Path:
    if not os.path.isfile(path):  # noqa: PTH113 - it is False also where a folder may not be read
        raise InvalidRequest(
            f"{str(path)!r} is no file that can be read on this machine; give the path that it has where the driver "
            "runs, or a data set of the Hub (OWNER/NAME)",
            field=DATA_FIELD,
        )
    if path.suffix == _PARQUET:
        return _converted(lambda datasets: datasets.Dataset.from_parquet(str(path)), str(path))
    if path.suffix not in _JSONL:
        known = ", ".join((*_JSONL, _PARQUET))
        raise InvalidRequest(f"{path.name!r} has none of the suffixes {known}; convert it", field=DATA_FIELD)
    return path


def _of_hub(place: DataPlace, split: str) -> Path:
    if not is_hub_name(place.data):
        text = f"{place.data[:200]!r} is neither a file here nor a data set of the Hub; give a path, or OWNER/NAME"
        raise InvalidRequest(text, field=DATA_FIELD)

    def load(datasets: Any) -> Any:
        subset = place.subset or None
        try:
            builder = datasets.load_dataset_builder(place.data, subset, revision=place.revision or None)
        except Exception:
            if (snapshot := _snapshot(place)) is None:
                raise
            builder, own = datasets.load_dataset_builder(snapshot, subset), f"{snapshot}/"
        else:
            own = "hf://datasets/"
        _check_own_files(builder, own)
        builder.download_and_prepare()
        return builder.as_dataset(split=split)

    return _converted(load, place.data)


def _check_own_files(builder: Any, own: str) -> None:
    """Raises `ValueError` for files that do not begin with `own`: the card of a data set may name any file of this
    host, and any address."""
    for files in (getattr(builder.config, "data_files", None) or {}).values():
        for file in map(str, files):
            if "::" in file or not (file if "://" in file else os.path.normpath(file)).startswith(own):
                raise ValueError(f"its card names a file that is not its own: {file[:100]}")


def _snapshot(place: DataPlace) -> str | None:
    """The folder of the Hub's cache that `hf download` filled, which `datasets` does not look into by itself."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    revision = place.revision or None
    try:
        return str(snapshot_download(place.data, repo_type="dataset", revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None


def _converted(load: Any, name: str) -> Path:
    """Writes a `Dataset` as JSONL, under a name that its content gives it."""
    try:
        import datasets
    except ImportError:
        raise InvalidRequest(
            f"{name!r} needs the package datasets: pip install 'ebbtide[data]' where the driver runs and where you "
            "submit, or give a JSONL file",
            field=DATA_FIELD,
        ) from None
    try:
        rows = load(datasets)
    except Exception as error:
        raise InvalidRequest(
            f"{name!r} cannot be loaded ({type(error).__name__}: {str(error)[:300]}); without a network, fetch it "
            f"elsewhere (hf download --repo-type dataset {name}) and bring its cache (HF_HOME) here, or give the path "
            "of a JSONL file",
            field=DATA_FIELD,
        ) from error
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "ebbtide"
    try:
        return _written(rows, folder)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name!r} has a row that is no JSON ({error})", field=DATA_FIELD) from error


def _written(rows: Any, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    digest = blake2b(digest_size=16)
    descriptor, temporary = tempfile.mkstemp(dir=folder, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            for row in rows:
                line = msgspec.json.encode(row) + b"\n"
                digest.update(line)
                file.write(line)
        Path(temporary).chmod(0o644)  # an isolated process may be another user's
        return Path(temporary).rename(folder / f"{digest.hexdigest()}.jsonl")
    finally:
        Path(temporary).unlink(missing_ok=True)


class RowFile:
    """The rows of a JSONL file. Memory holds 8 bytes for each; a row is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        """Raises `InvalidRequest` if the file cannot be read."""
        self.path = path
        self.starts = array("q")
        self.digest = ""
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidRequest(
                f"{str(path)!r} cannot be read ({error.strerror}); let the user that environments run as read it",
                field=DATA_FIELD,
            ) from None
        weakref.finalize(self, os.close, self._descriptor)

    def scan(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Reads all rows in order, each with its number, which `row` takes. Raises `InvalidRequest` for a line that is
        no JSON object, naming the line; it shows nothing of it."""
        digest, start, number = blake2b(digest_size=16), 0, 0
        with open(self._descriptor, "rb", closefd=False) as file:
            while line := file.readline(_MOST_ROW + 1):
                number += 1
                digest.update(line)
                if line.strip():
                    self.starts.append(start)
                    yield len(self.starts) - 1, self._decoded(line, number)
                start += len(line)
        self.digest = digest.hexdigest()

    def row(self, number: int) -> dict[str, Any]:
        """Reads one row again; safe from several threads."""
        start = self.starts[number]
        end = self.starts[number + 1] if number + 1 < len(self.starts) else start + _MOST_ROW
        return self._decoded(os.pread(self._descriptor, end - start, start).split(b"\n", 1)[0], None)

    def _decoded(self, line: bytes, number: int | None) -> dict[str, Any]:
        place = f"{self.path.name}, line {number}" if number is not None else self.path.name
        if len(line) > _MOST_ROW:
            raise InvalidRequest(f"{place}: more than {_MOST_ROW} bytes; shorten it", field=DATA_FIELD)
        try:
            return msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise InvalidRequest(f"{place}: no JSON object; write one object a line", field=DATA_FIELD) from None
