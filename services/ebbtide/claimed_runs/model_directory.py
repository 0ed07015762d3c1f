"""Checks that a directory holds a model that can be trained, without loading it, so that submit can refuse it."""

import json
from pathlib import Path
from typing import Any

from ebbtide.errors import InvalidRequest
from ebbtide.types.model_path import no_directory
from ebbtide.types.spec_file import NO_LORA

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def check_model_directory(directory: Path, *, field: str = "model") -> None:
    """Raises `InvalidRequest` naming `field` unless `directory` is a Hugging Face checkpoint in safetensors with a
    tokenizer whose ids all have a row in the embedding."""
    try:
        _check(directory, field)
    except (AttributeError, TypeError, KeyError, OSError) as error:  # its JSON files have unexpected shapes
        raise InvalidRequest(
            f"{str(directory)[:200]!r} is damaged ({type(error).__name__}: {str(error)[:200]}); copy it again",
            field=field,
        ) from error


def _check(directory: Path, field: str) -> None:
    if not directory.is_dir():
        raise InvalidRequest(no_directory(str(directory)), field=field)
    if (directory / "adapter_config.json").exists():
        raise InvalidRequest(NO_LORA, field=field)
    config = _read(directory / "config.json", field)
    if not any(directory.glob("*.safetensors")):
        pickled = any(path for pattern in _PICKLED for path in directory.glob(pattern))
        reason = "has only pickled weights, which are never loaded; convert them to" if pickled else "holds no"
        raise InvalidRequest(f"{str(directory)!r} {reason} safetensors", field=field)
    for shard in _shards(directory, field):
        if not (directory / shard).is_file():
            raise InvalidRequest(f"the index names {shard!r}, which is missing; copy the checkpoint again", field=field)
    for path in directory.glob("*.safetensors"):
        _check_whole(path, field)
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise InvalidRequest(f"{str(directory)!r} has no tokenizer; save one beside the weights", field=field)
    rows = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    highest = highest_token_id(directory, field=field)
    if isinstance(rows, int) and highest >= rows:
        raise vocabulary_mismatch(highest, rows, field)


def _check_whole(path: Path, field: str) -> None:
    """Checks the header, without reading the weights."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise InvalidRequest(f"{str(path)!r} is damaged ({error}); copy it again", field=field) from None


def highest_token_id(directory: Path, *, field: str = "model") -> int:
    """Returns the highest id in `tokenizer.json`, or -1 if the tokenizer is stored in another form."""
    path = directory / "tokenizer.json"
    if not path.exists():
        return -1
    content = _read(path, field)
    vocabulary = content.get("model", {}).get("vocab", {})
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    return max([*ids, *(token["id"] for token in content.get("added_tokens", []))], default=-1)


def vocabulary_mismatch(highest: int, rows: int, field: str = "model") -> InvalidRequest:
    return InvalidRequest(
        f"vocabulary mismatch: the tokenizer gives ids up to {highest}, the embedding has {rows} rows; "
        "use the tokenizer that belongs to the weights",
        field=field,
    )


def _shards(directory: Path, field: str) -> set[str]:
    index = directory / "model.safetensors.index.json"
    return set(_read(index, field).get("weight_map", {}).values()) if index.exists() else set()


def _read(path: Path, field: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidRequest(f"{str(path.parent)!r} is no checkpoint: it has no {path.name}", field=field) from None
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{str(path)!r} cannot be read: {error}", field=field) from error
    if not isinstance(content, dict):
        raise InvalidRequest(f"{str(path)!r} holds no JSON object", field=field)
    return content
