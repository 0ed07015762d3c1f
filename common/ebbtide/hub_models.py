"""Finds models by their names on the Hugging Face Hub: in the cache of this machine, or by fetching them.

It needs `huggingface_hub`, which comes with `transformers`, and imports it only for a name of the Hub.
"""

import contextlib
import json
import re
from pathlib import Path, PurePath
from typing import Any, Final

from ebbtide.errors import InvalidRequest

#: OWNER/NAME, as the Hugging Face Hub calls models. A relative path may look the same, and wins where it exists.
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
#: Of a repository's top folder: configuration and tokenizer, and weights in safetensors.
_TOKENIZER: Final = ["*.json", "*.jinja", "*.txt", "*.model"]
_WANTED: Final = ["*.safetensors", *_TOKENIZER]
_LOOK_S: Final = 10.0


def is_hub_name(model: str) -> bool:
    """Whether `model` is no folder here and looks like a name of the Hub."""
    return bool(_HUB_NAME.fullmatch(model)) and not Path(model).is_dir()


def no_directory(model: str) -> str:
    """What is wrong with a `model` that is no directory here, and the remedy."""
    told = f"{model[:200]!r} is no directory; give the path of a local checkpoint"
    if not _HUB_NAME.fullmatch(model):
        return told
    folder = f"models/{model.partition('/')[2]}"
    return f"{told}. From the Hugging Face Hub: hf download {model} --local-dir {folder}, then give {folder}"


def model_name(model: str) -> str:
    """The last part of a path or of a name of the Hub; of a snapshot in the Hub's cache, the repository's."""
    path = PurePath(model)
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.rpartition("--")[2]
    return path.name


def model_place(model: str) -> Path:
    """Where a model is, or will be once it is fetched: its path, or the Hub's cache."""
    if is_hub_name(model):
        with contextlib.suppress(ImportError):
            from huggingface_hub.constants import HF_HUB_CACHE

            return Path(HF_HUB_CACHE)
    return Path(model)


def cached_model(model: str) -> Path | None:
    """The folder of a model: its path if it is one, or the complete snapshot in the Hub's cache; None without one."""
    if not is_hub_name(model):
        return Path(model)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None
    try:
        folder = Path(snapshot_download(model, allow_patterns=_WANTED, ignore_patterns="*/*", local_files_only=True))
        return folder if _has_weights(folder) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _has_weights(folder: Path) -> bool:
    """Whether a snapshot has all files of its weights: one that a tokenizer was loaded from has none."""
    if (index := folder / "model.safetensors.index.json").is_file():
        shards = json.loads(index.read_bytes())["weight_map"].values()
        return all((folder / name).is_file() for name in set(shards))
    return any(folder.glob("*.safetensors"))


def model_folder(model: str) -> Path:
    """The folder of a model, fetched from the Hub if it is neither a path nor in its cache, which may take minutes.

    A snapshot in the cache is taken as it is: programs that share the cache use one commit. Raises `InvalidRequest`
    naming `model`.
    """
    if (found := cached_model(model)) is not None:
        return found
    return _fetched(model, _WANTED)


def tokenizer_folder(model: str) -> Path:
    """Like `model_folder`, but fetches only configuration and tokenizer, some megabytes."""
    return found if (found := cached_model(model)) is not None else _fetched(model, _TOKENIZER)


def same_folder(source: Path, model: str) -> Path:
    """The folder here of what `source` is on another machine: the same path, or for a snapshot in a cache that is not
    complete here, the same commit of `model` from the Hub. Raises `InvalidRequest` naming `model`."""
    if source.parent.name != "snapshots" or not is_hub_name(model) or _has_weights(source):
        return source
    return _fetched(model, _WANTED, source.name)


def _fetched(model: str, patterns: list[str], commit: str | None = None) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=commit, allow_patterns=patterns, ignore_patterns="*/*"))
    except ImportError:
        reason = "the package huggingface_hub is not installed"
    except Exception as error:  # noqa: BLE001 - of a library, which raises those of its HTTP client, too
        reason = f"{type(error).__name__}: {str(error).strip()[:200]}"
    raise InvalidRequest(
        f"{no_directory(model)}. It could not be fetched here ({reason}); gated models need HF_TOKEN, and a cache "
        "that was filled elsewhere is found by HF_HOME",
        field="model",
    )


def is_on_hub(model: str) -> bool:
    """Whether the Hub answers that it has the model; asks for 10 s at most."""
    try:
        from huggingface_hub import HfApi

        HfApi().model_info(model, timeout=_LOOK_S)
    except Exception:  # noqa: BLE001 - whatever it is, the model was not seen
        return False
    return True


def push_folder(folder: Path, repository: str, *, private: bool, message: str) -> str:
    """Uploads a checkpoint's weights, configuration and tokenizer, but no state of its training. Returns its URL.

    Makes the repository unless it exists. Raises `InvalidRequest` naming `repository`.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise InvalidRequest("needs the package huggingface_hub; install it here", field="repository") from None
    api: Any = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        made = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message=message,
            allow_patterns=_WANTED,
            ignore_patterns="*/*",
        )
    except Exception as error:
        raise InvalidRequest(
            f"{repository!r} could not be written ({type(error).__name__}: {str(error).strip()[:200]}); give a token "
            "that may write it: hf auth login, or HF_TOKEN",
            field="repository",
        ) from error
    return str(made.commit_url)
